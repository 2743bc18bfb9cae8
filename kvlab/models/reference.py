"""The decoder's mathematics without a cache: every token's query against every key it may see, in plain torch.

This is the truth that stands next to the fast path. It reads weights by their checkpoint names, fuses nothing,
keeps nothing, and costs a square of scores per head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvlab.models.facts import AttentionFacts, LayerFacts, ModelConfig
from kvlab.models.layer import reference as layer_reference
from kvlab.models.modules import LAYERS
from kvlab.models.modules.attention import reference_heads, visible
from kvlab.models.modules.base import WholeContext
from kvlab.models.modules.norm import reference as norm_reference
from kvlab.models.weights import Names

__all__ = ["attention_weights", "layer_heads", "reference_forward", "visible"]


def reference_forward(config: ModelConfig, weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """Logits [T, vocab] of the sequence `ids` [T], alone and from its start, in the dtype of `weights`."""
    hidden = _run(config, weights, WholeContext(ids, max_len=config.max_position), config.num_layers)
    head, names = config.head, Names(weights)
    if head.norm is not None:
        hidden = norm_reference(head.norm, names, "model.norm", hidden)
    logits = hidden @ weights["model.embed_tokens.weight" if head.tied else "lm_head.weight"].T
    logits = (logits + weights["lm_head.bias"] if head.bias else logits) * head.scale
    return head.softcap * torch.tanh(logits / head.softcap) if head.softcap else logits


def attention_weights(config: ModelConfig, weights: Mapping[str, Tensor], ids: Tensor) -> list[Tensor]:
    """Weights [Hq, T, T] of each layer with attention over keys and values, for the sequence `ids` [T]."""
    whole = WholeContext(ids, max_len=config.max_position)
    _run(config, weights, whole, config.num_layers)
    kept = [("attention weights", i) for i in range(config.num_layers)]
    return [whole.memory[key] for key in kept if key in whole.memory]


def layer_heads(
    config: ModelConfig, weights: Mapping[str, Tensor], ids: Tensor, layer: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [T, Hq, D], key and value [T, Hkv, D] of one layer for the sequence `ids` [T], as attention gets them.

    Raises:
        ValueError: the model has no such layer, or it is not one of attention.
    """
    if not 0 <= layer < config.num_layers:
        raise ValueError(f"layer {layer}: must be 0 to {config.num_layers - 1}")
    facts = config.layers[layer]
    branch = facts.branches[0] if isinstance(facts, LayerFacts) else None
    if branch is None or not isinstance(branch.module, AttentionFacts):
        raise ValueError(f"layer {layer}: does not begin with attention")
    whole = WholeContext(ids, max_len=config.max_position)
    stream, names = _run(config, weights, whole, layer), Names(weights, f"model.layers.{layer}")
    whole.layer = layer
    normed = stream if branch.norm is None else norm_reference(branch.norm, names, branch.norm_name, stream)
    return reference_heads(branch.module, names, normed, whole)


def _run(config: ModelConfig, weights: Mapping[str, Tensor], whole: WholeContext, layers: int) -> Tensor:
    """What leaves the first `layers` layers, [T, hidden]."""
    facts, names = config.embedding, Names(weights, "model")
    stream = names["embed_tokens.weight"][whole.ids] * facts.scale
    if facts.positions:
        stream = stream + names["embed_positions.weight"][whole.positions + facts.position_offset]
    if facts.norm is not None:
        stream = norm_reference(facts.norm, names, "embed_norm", stream)
    stem = LAYERS[type(config.extra)][1](config.extra, names, config) if config.extra is not None else None
    stream = stem.enter(stream, whole) if stem else stream
    for i, layer in enumerate(config.layers[:layers]):
        whole.layer = i
        run = LAYERS[type(layer)][1] if type(layer) in LAYERS else layer_reference
        stream = run(layer, names.scope(f"layers.{i}"), stream, whole)
    return stem.leave(stream, whole) if stem else stream
