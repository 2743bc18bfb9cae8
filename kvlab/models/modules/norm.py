"""Norms over the last axis."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch.nn.functional as F
from torch import Tensor

from kvlab.models.facts import NormFacts
from kvlab.models.weights import Scope
from kvlab.ops.norm import rms_norm


class Norm:
    """RMS or layer norm; call it on [..., width]."""

    def __init__(self, facts: NormFacts, source: Scope, name: str, width: int) -> None:
        self.facts, self.width = facts, width
        self.weight = source.take(f"{name}.weight", width) if facts.weight else None
        self.bias = source.take(f"{name}.bias", width) if facts.bias else None

    @cached_property
    def scale(self) -> Tensor | None:
        """What the normed values are multiplied with: the weight plus its offset, [width]."""
        return self.weight if self.weight is None or not self.facts.offset else self.weight + self.facts.offset

    def __call__(self, x: Tensor) -> Tensor:
        if self.facts.kind == "layer":
            return F.layer_norm(x, (self.width,), self.scale, self.bias, self.facts.eps)
        scale = self.scale
        return rms_norm(x, x.new_ones(self.width) if scale is None else scale, self.facts.eps)


def reference(facts: NormFacts, weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """The norm in plain torch."""
    if facts.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    normed = x / ((x * x).mean(-1, keepdim=True) + facts.eps).sqrt()
    if facts.weight:
        normed = normed * (weights[f"{name}.weight"] + facts.offset)
    return normed + weights[f"{name}.bias"] if facts.bias else normed
