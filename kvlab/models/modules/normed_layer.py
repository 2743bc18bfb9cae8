"""A layer whose residual stream passes through the norms: what a branch reads is also what its result is added to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvlab.models import modules
from kvlab.models.facts import NormFacts, fact
from kvlab.models.modules.base import Place, StepContext, WholeContext
from kvlab.models.modules.norm import Norm
from kvlab.models.modules.norm import reference as norm_reference
from kvlab.models.weights import Names, Scope


@dataclass(frozen=True)
class NormedBranch:
    """stream = norm(stream); stream = kept * stream + scale * module(stream)."""

    module: Any
    norm: NormFacts
    norm_name: str
    kept: float = fact("scale", 1.0)
    scale: float = fact("scale", 1.0)


@dataclass(frozen=True)
class NormedLayerFacts:
    """Branches one after the other (MiniMax)."""

    branches: tuple[NormedBranch, ...]


class NormedLayer:
    """Call it on the residual stream [T, hidden] and the step; it returns the stream after the layer."""

    def __init__(self, facts: NormedLayerFacts, source: Scope, hidden: int, index: int) -> None:
        self.branches, part = [], 0
        for b in facts.branches:
            module = modules.build(b.module, source, hidden, Place(index, part))
            self.branches.append((b, Norm(b.norm, source, b.norm_name, hidden), module))
            part += modules.num_parts(b.module)

    def __call__(self, stream: Tensor, step: StepContext) -> Tensor:
        for b, norm, module in self.branches:
            stream = norm(stream)
            stream = b.kept * stream + b.scale * module(stream, step)
        return stream


def layer_reference(facts: NormedLayerFacts, weights: Names, stream: Tensor, whole: WholeContext) -> Tensor:
    """The layer in plain torch over a whole sequence [T, hidden]."""
    for b in facts.branches:
        stream = norm_reference(b.norm, weights, b.norm_name, stream)
        stream = b.kept * stream + b.scale * modules.reference(b.module, weights, stream, whole)
    return stream
