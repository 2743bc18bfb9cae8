"""Mixtures of experts: few and narrow ones, and fewer chosen than there are."""

from __future__ import annotations

from typing import Any

from kvlab.lab.parity.small import dense
from kvlab.lab.parity.small.row import HEAD_DIM, Changes, Small
from kvlab.models.facts import ModelConfig

EXPERTS = 6
CHOSEN = 3
COUNT = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
TOP = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k")
WIDTH = ("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")


def experts(config: dict[str, Any]) -> Changes:
    """At most `EXPERTS` experts of which at most `CHOSEN` run, and their widths."""
    new: Changes = {name: min(config[name], EXPERTS) for name in COUNT if config.get(name)}
    new |= {name: min(config[name], CHOSEN) for name in TOP if config.get(name)}
    # a wider neighbourhood, so that another expert is often within it
    new |= {"router_jitter_noise": 0.3} if config["model_type"] == "phimoe" else {}
    new |= {"rotary_dim": HEAD_DIM // 2} if config.get("rotary_dim") else {}
    return new | {name: HEAD_DIM + 4 * (i + 1) for i, name in enumerate(WIDTH) if config.get(name)}


def widths(config: dict[str, Any], facts: ModelConfig) -> Changes:
    """As Llama's, and the experts."""
    return dense.widths(config, facts) | experts(config)


def layers(config: dict[str, Any], facts: ModelConfig, kept: tuple[int, ...]) -> Changes:
    """As Llama's, and which of the kept layers have experts."""
    new = dense.layers(config, facts, kept)
    step, listed = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    if step > 1 or listed:
        sparse = [(i + 1) % step == 0 and i not in listed for i in kept]
        new |= {"decoder_sparse_step": 1, "mlp_only_layers": [i for i, s in enumerate(sparse) if not s]}
    if config.get("first_k_dense_replace") is not None:
        new["first_k_dense_replace"] = sum(i < config["first_k_dense_replace"] for i in kept)
    return new


SMALL = {
    name: Small(widths, layers) for name in ("mixtral", "qwen3_moe", "qwen2_moe", "minimax_m2", "glm4_moe", "phimoe")
}
