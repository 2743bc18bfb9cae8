"""All layers of a model as one operation, where all are of the commonest kind: what a decode step of few rows runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvlab.models.facts import AttentionFacts
from kvlab.models.modules.base import StepContext
from kvlab.models.plain_layer import PlainLayer
from kvlab.ops.decode_layers import DecodeLayer, LayerStack, decode_layers, fuses


class PlainStack:
    """Plain layers that turn by the same angles."""

    def __init__(self, layers: Sequence[PlainLayer]) -> None:
        self.layers = tuple(layers)
        self._stack = LayerStack(tuple(_decode_layer(layer) for layer in layers))

    @classmethod
    def of(cls, layers: Sequence[Any]) -> PlainStack | None:
        """The stack of `layers`; None where they are not all plain, or turn by different angles."""
        if not layers or not all(type(layer) is PlainLayer for layer in layers):
            return None
        rules = {(layer.facts.rope, layer.facts.key_dim) for layer in layers}
        return cls(layers) if len(rules) == 1 else None

    def __call__(self, stream: Tensor, step: StepContext) -> Tensor:
        """The residual stream [T, hidden] after all layers."""
        views, batches = zip(*(step.part(layer.place) for layer in self.layers), strict=True)
        if step.deltas is not None or not fuses(stream, self._stack, views, batches):
            for layer in self.layers:
                stream = layer(stream, step)
            return stream
        f: AttentionFacts = self.layers[0].facts
        assert f.rope is not None, "a plain layer rotates"
        return decode_layers(stream, self._stack, views, batches, step.angles(f.rope, f.key_dim))


def _decode_layer(layer: PlainLayer) -> DecodeLayer:
    f: AttentionFacts = layer.facts
    return DecodeLayer(layer.qkv, layer.out, layer.out_bias, layer.mlp, f.scale, f.window, f.softcap)
