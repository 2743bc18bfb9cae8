"""Gemma 3n: few and narrow of everything; of each zone (sparse gates, dense gates, shared caches) both kinds of layer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from kvlab.lab.parity.small.dense import attentions, small_heads
from kvlab.lab.parity.small.dense import layers as dense_layers
from kvlab.lab.parity.small.dense import widths as dense_widths
from kvlab.lab.parity.small.row import HEAD_DIM, TESTED_TOKENS, VOCAB, WINDOW, Changes, Small
from kvlab.models.facts import ModelConfig


def widths(config: dict[str, Any], facts: ModelConfig) -> Changes:
    """Heads in their ratio; a token's input to a layer, and the low rank, narrower than all else; a soft-cap that binds."""
    heads, kv_heads = small_heads(facts.layers[0].attention)
    return {
        "hidden_size": heads * (HEAD_DIM - 6), "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM, "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB - 20,
        "max_position_embeddings": 2 * TESTED_TOKENS, "hidden_size_per_layer_input": 10, "laurel_rank": 6,
        "final_logit_softcapping": 0.02, "sliding_window": WINDOW,
    }  # fmt: skip


def layers(config: dict[str, Any], facts: ModelConfig, kept: tuple[int, ...]) -> Changes:
    """What each kept layer is."""
    every = [facts.layers[i] for i in kept]
    return {
        "num_hidden_layers": len(kept),
        "layer_types": ["sliding_attention" if x.attention.window else "full_attention" for x in every],
        "num_kv_shared_layers": sum(x.attention.source is not None for x in every),
        "activation_sparsity_pattern": [x.sparsity for x in every],
        "intermediate_size": [5 * HEAD_DIM] * len(kept),
    }


def kinds(config: dict[str, Any], facts: ModelConfig) -> Sequence[Hashable]:
    """Window or not, sparse or not, of its own or shared."""
    return [(x.attention.window, x.sparsity, x.attention.source is None) for x in facts.layers]


def neighbours(config: dict[str, Any], facts: ModelConfig) -> Sequence[Hashable]:
    """Of its own or shared."""
    return [source is None for source in (a.source for a in attentions(facts))]


SMALL = {"gemma3n": Small(widths, layers, kinds), "kvlab_cla": Small(dense_widths, dense_layers, neighbours)}
