"""Mamba and Mamba-2, alone and in hybrids: few heads, channels and values of state, all of different number."""

from __future__ import annotations

from typing import Any

from kvlab.lab.parity.small import dense, moe
from kvlab.lab.parity.small.row import VOCAB, Changes, Small
from kvlab.models.facts import AttentionFacts, ModelConfig
from kvlab.models.modules.mamba2 import Mamba2Facts

HIDDEN, STATE, RANK, WIDTH = 48, 12, 5, 8
CHUNK = 8  # tokens that transformers' own scan takes at once

# what each family calls heads, their width, groups, state size and chunk of its Mamba-2 mixers
_USUAL = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_chunk_size")
FIELDS = {
    "mamba2": ("num_heads", "head_dim", "n_groups", "state_size", "chunk_size"),
    "bamba": _USUAL,
    "granitemoehybrid": _USUAL,
    "falcon_h1": _USUAL,
    "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "chunk_size"),
    "zamba2": ("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "chunk_size"),
}


def mamba2(config: dict[str, Any], facts: ModelConfig, inner: int) -> Changes:
    """Heads that make up `inner`, in at most two groups."""
    groups = next(b.module for x in facts.layers for b in x.branches if isinstance(b.module, Mamba2Facts)).num_groups
    values = (inner // WIDTH, WIDTH, min(groups, 2), STATE, CHUNK)
    return dict(zip(FIELDS[config["model_type"]], values, strict=True))


def mixers(facts: ModelConfig, kept: tuple[int, ...]) -> list[str]:
    """transformers' name for the mixer of each kept layer."""
    kinds = [facts.layers[i].branches[0].module for i in kept]
    return ["full_attention" if isinstance(m, AttentionFacts) else "linear_attention" for m in kinds]


def depth(config: dict[str, Any], facts: ModelConfig, kept: tuple[int, ...]) -> Changes:
    """The number of layers: all that sets them apart is a period that the kept ones begin with."""
    return {"num_hidden_layers": len(kept)}


def _pure(config: dict[str, Any], facts: ModelConfig) -> Changes:
    """Models without attention, of either generation."""
    new: Changes = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "intermediate_size": 2 * HIDDEN}
    if config["model_type"] == "mamba2":
        return new | mamba2(config, facts, 2 * HIDDEN)
    return new | {"state_size": STATE, "time_step_rank": RANK}


def _jamba(config: dict[str, Any], facts: ModelConfig) -> Changes:
    experts = moe.experts(config) if config.get("num_experts", 16) > 1 else {}
    return dense.widths(config, facts) | experts | {"mamba_d_state": STATE, "mamba_dt_rank": RANK}


def _hybrid(config: dict[str, Any], facts: ModelConfig) -> Changes:
    """Attention as Llama's, and Mamba-2 heads."""
    new = dense.widths(config, facts)
    return new | mamba2(config, facts, config.get("mamba_expand", 2) * new["hidden_size"])


def _bamba_layers(config: dict[str, Any], facts: ModelConfig, kept: tuple[int, ...]) -> Changes:
    kinds = mixers(facts, kept)
    return {"num_hidden_layers": len(kept), "attn_layer_indices": [i for i, k in enumerate(kinds) if k[0] == "f"]}


SMALL = {
    **{name: Small(_pure, depth) for name in ("mamba", "mamba2", "falcon_mamba")},
    "jamba": Small(_jamba, depth),
    "bamba": Small(_hybrid, _bamba_layers),
}
