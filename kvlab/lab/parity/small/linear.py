"""Linear attention: few heads; layers differ by their decay, which is no kind of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlab.lab.parity.small import dense, moe
from kvlab.lab.parity.small.row import HEAD_DIM, TESTED_TOKENS, VOCAB, Changes, Small
from kvlab.models.facts import AttentionFacts, ModelConfig


def widths(config: dict[str, Any], facts: ModelConfig) -> Changes:
    """Heads in their ratio, few experts, blocks of transformers' own loop shorter than the tested tokens."""
    attention = next((m for m in _mixers(facts) if isinstance(m, AttentionFacts)), None)
    heads, kv_heads = dense.small_heads(attention) if attention else (4, 4)
    hidden = heads * (HEAD_DIM - 6)
    new = {
        "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": HEAD_DIM,
        "intermediate_size": hidden + 2 * HEAD_DIM, "vocab_size": VOCAB, "max_position_embeddings": 2 * TESTED_TOKENS,
        "block_size": 16,
    }  # fmt: skip
    return new | moe.experts(config)


def layers(config: dict[str, Any], facts: ModelConfig, kept: tuple[int, ...]) -> Changes:
    """Which of the kept layers are attention."""
    every = _kinds(config, facts)
    return {"num_hidden_layers": len(kept), "layer_types": [every[i] for i in kept]}


def _mixers(facts: ModelConfig) -> list[Any]:
    return [layer.branches[0].module for layer in facts.layers]


def _kinds(config: dict[str, Any], facts: ModelConfig) -> Sequence[str]:
    return ["full_attention" if isinstance(m, AttentionFacts) else "linear_attention" for m in _mixers(facts)]


def rwkv_widths(config: dict[str, Any], facts: ModelConfig) -> Changes:
    """Three different widths, and no rescaling: it changes weights in place when the model first runs."""
    return {
        "hidden_size": 44, "attention_hidden_size": 36, "intermediate_size": 52, "vocab_size": VOCAB,
        "context_length": 2 * TESTED_TOKENS, "rescale_every": 0,
    }  # fmt: skip


def rwkv_layers(config: dict[str, Any], facts: ModelConfig, kept: tuple[int, ...]) -> Changes:
    """Equal layers."""
    return {"num_hidden_layers": len(kept)}


SMALL = {
    **{name: Small(widths, layers, _kinds) for name in ("minimax", "kvlab_linear", "kvlab_retnet")},
    "rwkv": Small(rwkv_widths, rwkv_layers),
}
