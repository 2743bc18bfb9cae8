"""Hybrids of attention and small states: the heads of both few, of widths that are all different."""

from __future__ import annotations

from typing import Any

from kvlab.lab.parity.small import dense, moe
from kvlab.lab.parity.small.row import HEAD_DIM, TESTED_TOKENS, VOCAB, Changes, Small
from kvlab.models.facts import AttentionFacts, MLPFacts, ModelConfig
from kvlab.models.modules.kda import KDAFacts
from kvlab.models.modules.moe import MoEFacts


def qwen_widths(config: dict[str, Any], facts: ModelConfig) -> Changes:
    """As Llama's, with few experts and a gated delta net of two key heads and four value heads."""
    delta = {
        # a quarter of it turns: four pairs
        "head_dim": 2 * HEAD_DIM,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 20,
    }
    return dense.widths(config, facts) | moe.experts(config) | delta


def qwen_layers(config: dict[str, Any], facts: ModelConfig, kept: tuple[int, ...]) -> Changes:
    """Which of the kept layers are attention, and which have experts."""
    new: Changes = {"num_hidden_layers": len(kept)}
    mixers = [facts.layers[i].branches[0].module for i in kept]
    new["layer_types"] = ["full_attention" if isinstance(m, AttentionFacts) else "linear_attention" for m in mixers]
    if config.get("mlp_only_layers") or (config.get("decoder_sparse_step") or 1) > 1:
        dense_ones = [n for n, i in enumerate(kept) if isinstance(facts.layers[i].branches[1].module, MLPFacts)]
        new |= {"decoder_sparse_step": 1, "mlp_only_layers": dense_ones}
    return new


def short_conv_widths(config: dict[str, Any], facts: ModelConfig) -> Changes:
    """As Llama's, with few experts; the width of feed-forward parts as it stands."""
    new = dense.widths(config, facts) | moe.experts(config)
    return new | {"block_auto_adjust_ff_dim": False, "block_ff_dim": new["intermediate_size"]}


def short_conv_layers(config: dict[str, Any], facts: ModelConfig, kept: tuple[int, ...]) -> Changes:
    """Which of the kept layers are attention, and how many come before those with experts."""
    mixers = [facts.layers[i].branches[0].module for i in kept]
    new: Changes = {"num_hidden_layers": len(kept)}
    new["layer_types"] = ["full_attention" if isinstance(m, AttentionFacts) else "conv" for m in mixers]
    mixtures = [isinstance(facts.layers[i].branches[1].module, MoEFacts) for i in kept]
    return new | ({"num_dense_layers": mixtures.count(False)} if any(mixtures) else {})


def kimi_widths(config: dict[str, Any], facts: ModelConfig) -> Changes:
    """Few heads of both kinds, narrow latents, few experts."""
    hidden = 4 * 14
    new = {
        "hidden_size": hidden, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": hidden + 24,
        "vocab_size": VOCAB, "model_max_length": 2 * TESTED_TOKENS, "kv_lora_rank": 24, "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 12, "v_head_dim": 14, "q_lora_rank": 20 if config.get("q_lora_rank") else None,
    }  # fmt: skip
    return new | moe.experts(config)


def kimi_layers(config: dict[str, Any], facts: ModelConfig, kept: tuple[int, ...]) -> Changes:
    """Which of the kept layers are attention (counted from 1), and how many come before those with experts."""
    kda = {n: isinstance(facts.layers[i].branches[0].module, KDAFacts) for n, i in enumerate(kept, start=1)}
    linear = (config.get("linear_attn_config") or {}) | {
        "num_heads": 3, "head_dim": 18, "short_conv_kernel_size": 4,
        "kda_layers": [n for n in kda if kda[n]], "full_attn_layers": [n for n in kda if not kda[n]],
    }  # fmt: skip
    dense_ones = [isinstance(facts.layers[i].branches[1].module, MLPFacts) for i in kept]
    return {
        "num_hidden_layers": len(kept), "linear_attn_config": linear, "first_k_dense_replace": dense_ones.count(True)
    }  # fmt: skip


SMALL = {name: Small(qwen_widths, qwen_layers) for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")} | {
    "lfm2": Small(short_conv_widths, short_conv_layers),
    "lfm2_moe": Small(short_conv_widths, short_conv_layers),
    "kimi_linear": Small(kimi_widths, kimi_layers),
}
