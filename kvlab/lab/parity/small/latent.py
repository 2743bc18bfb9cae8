"""Latent attention: every width small and unlike its neighbours, a dense layer before those with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvlab.lab.parity.small.dense import small_rotary
from kvlab.lab.parity.small.row import TESTED_TOKENS, VOCAB, WINDOW, Changes, Small
from kvlab.models.facts import ModelConfig, RopeFacts
from kvlab.models.modules.mla import LatentAttentionFacts

ROTARY = 12  # values of a rotary key: six frequencies


def latents(facts: ModelConfig) -> list[LatentAttentionFacts]:
    """The latent attention of each layer."""
    mixers = [layer.branches[0].module for layer in facts.layers]
    return [getattr(mixer, "attention", mixer) for mixer in mixers]


def widths(config: dict[str, Any], facts: ModelConfig) -> Changes:
    """Few heads, narrow latents, few experts in the original's groups."""
    heads, hidden = 4, 4 * 14
    new: Changes = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": hidden + 24,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2 * TESTED_TOKENS,
        "kv_lora_rank": 24,
        "q_lora_rank": 20 if config.get("q_lora_rank") else None,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": ROTARY,
        "v_head_dim": 14,
    }
    if "index_topk" in config:
        # all of an indexer's few heads may be silent for a key; of 32 one always speaks, so no scores are equal
        new |= {"index_n_heads": 32, "index_head_dim": ROTARY + 6, "index_topk": WINDOW}
    return new | small_experts(config) | small_stretch(config, latents(facts)[0].rope)


def small_experts(config: Mapping[str, Any]) -> Changes:
    """Twice as many experts as a token runs through, in groups as before where there are groups."""
    if not config.get("n_routed_experts"):
        return {}
    new: Changes = {"moe_intermediate_size": 18, "n_routed_experts": 8, "num_experts_per_tok": 3}
    if (config.get("n_group") or 1) > 1:
        # three to a group: which groups are best must depend on how many of their members count
        new |= {"n_group": 4, "topk_group": 2, "n_routed_experts": 12}
    return new


def layers(config: dict[str, Any], facts: ModelConfig, kept: tuple[int, ...]) -> Changes:
    """The kept layers; how many of them come before the experts."""
    new: Changes = {"num_hidden_layers": len(kept)}
    if config.get("mlp_layer_types"):
        new["mlp_layer_types"] = [config["mlp_layer_types"][i] for i in kept]
    if config.get("indexer_types"):
        new["indexer_types"] = [config["indexer_types"][i] for i in kept]
    if "first_k_dense_replace" in config:
        new["first_k_dense_replace"] = sum(i < config["first_k_dense_replace"] for i in kept)
    return new


def small_stretch(config: Mapping[str, Any], rope: RopeFacts | None) -> Changes:
    """The scaling of rotary keys made small; the rotations between which YaRN blends apart where they were one
    (Kimi-K2): with few pairs a ramp of no length hides what it begins and ends with."""
    if rope is None or rope.kind != "yarn" or rope.beta_fast != rope.beta_slow:
        return small_rotary(dict(config), rope, ROTARY)
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    apart = {**config, name: config[name] | {"beta_fast": 32.0}}
    return small_rotary(apart, replace(rope, beta_fast=32.0), ROTARY)


def kinds(config: dict[str, Any], facts: ModelConfig) -> list[Any]:
    """What sets layers apart; which earlier layer's choice one reads does not."""
    return [
        (type(layer.branches[0].module).__name__, type(layer.branches[1].module).__name__) for layer in facts.layers
    ]


SMALL = {
    name: Small(widths, layers, kinds)
    for name in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3")
}
