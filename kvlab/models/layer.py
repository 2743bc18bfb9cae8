"""A decoder layer as its facts describe it: steps of parallel branches on the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvlab.models import modules
from kvlab.models.facts import Branch, LayerFacts
from kvlab.models.modules.base import Place, StepContext, WholeContext
from kvlab.models.modules.norm import Norm
from kvlab.models.modules.norm import reference as norm_reference
from kvlab.models.weights import Names, Scope


@dataclass(frozen=True)
class _Branch:
    module: Any
    norm: Norm | None
    post_norm: Norm | None
    scale: float
    in_scale: float

    def __call__(self, stream: Tensor, step: StepContext) -> Tensor:
        x = stream if self.norm is None else self.norm(stream)
        x = self.module(x if self.in_scale == 1.0 else x * self.in_scale, step)
        x = x if self.post_norm is None else self.post_norm(x)
        return x if self.scale == 1.0 else x * self.scale


class Layer:
    """Call it on the residual stream [T, hidden] and the step; it returns the stream after the layer."""

    def __init__(self, facts: LayerFacts, source: Scope, hidden: int, index: int) -> None:
        self._norms: dict[str, Norm] = {}
        self.steps: list[list[_Branch]] = []
        part = 0
        for step in facts.steps:
            branches = []
            for b in step:
                norm = self._norm(b.norm, source, b.norm_name, hidden)
                post = self._norm(b.post_norm, source, b.post_norm_name, hidden)
                module = modules.build(b.module, source, hidden, Place(index, part))
                branches.append(_Branch(module, norm, post, b.scale, b.in_scale))
                part += modules.num_parts(b.module)
            self.steps.append(branches)

    def __call__(self, stream: Tensor, step: StepContext) -> Tensor:
        for branches in self.steps:
            stream = sum((branch(stream, step) for branch in branches), stream)
        return stream

    def _norm(self, facts: Any, source: Scope, name: str, hidden: int) -> Norm | None:
        """The norm called `name`; branches that name the same one share it."""
        if facts is None:
            return None
        if name not in self._norms:
            self._norms[name] = Norm(facts, source, name, hidden)
        return self._norms[name]


def reference(facts: LayerFacts, weights: Names, stream: Tensor, whole: WholeContext) -> Tensor:
    """The layer in plain torch over a whole sequence [T, hidden]."""
    for step in facts.steps:
        stream = stream + sum(_reference_branch(b, weights, stream, whole) for b in step)
    return stream


def _reference_branch(b: Branch, weights: Names, stream: Tensor, whole: WholeContext) -> Tensor:
    x = stream if b.norm is None else norm_reference(b.norm, weights, b.norm_name, stream)
    x = modules.reference(b.module, weights, x * b.in_scale, whole)
    x = x if b.post_norm is None else norm_reference(b.post_norm, weights, b.post_norm_name, x)
    return x * b.scale
