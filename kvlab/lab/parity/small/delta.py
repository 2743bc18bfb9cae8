"""Hybrids of attention and small states: the heads of both few, of widths that are all different."""

from __future__ import annotations

from typing import Any

from kvlab.lab.parity.small import dense, moe
from kvlab.lab.parity.small.row import HEAD_DIM, Changes, Small
from kvlab.models.facts import AttentionFacts, MLPFacts, ModelConfig


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


SMALL = {name: Small(qwen_widths, qwen_layers) for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")}
