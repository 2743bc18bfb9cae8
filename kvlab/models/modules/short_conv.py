"""A short convolution between two gates: a layer that remembers a few tokens and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvlab.models.modules.base import Place, StepContext, WholeContext
from kvlab.models.weights import Names, Scope
from kvlab.ops.conv1d import causal_conv1d
from kvlab.ops.conv1d import reference as conv_reference
from kvlab.ops.linear import linear


@dataclass(frozen=True)
class ShortConvFacts:
    """out(C * conv(B * X)), with B, C and X three projections of the stream.

    Names within `prefix`: `in_proj` [3 * hidden, hidden], B first, then C, then X; `conv.weight` [hidden, 1, kernel];
    `out_proj`; their biases where `bias`.

    Attributes:
        kernel: tokens that the convolution reads.
    """

    kernel: int
    bias: bool = False
    prefix: str = "conv"


class ShortConv:
    """Call it on [T, hidden]; keeps the last kernel - 1 values of B * X."""

    num_parts = 1

    def __init__(self, facts: ShortConvFacts, source: Scope, hidden: int, place: Place) -> None:
        f, scope = facts, source.scope(facts.prefix)
        self.place = place
        self.into = scope.take("in_proj.weight", 3 * hidden, hidden)
        self.conv = scope.take("conv.weight", hidden, 1, f.kernel)[:, 0]
        self.out = scope.take("out_proj.weight", hidden, hidden)
        self.into_bias = scope.take("in_proj.bias", 3 * hidden) if f.bias else None
        self.conv_bias = scope.take("conv.bias", hidden) if f.bias else None
        self.out_bias = scope.take("out_proj.bias", hidden) if f.bias else None

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[T, hidden] of `x` [T, hidden]."""
        views, batch = step.part(self.place)
        b, c, inner = linear(x, self.into, self.into_bias).chunk(3, dim=-1)
        mixed = causal_conv1d(b * inner, self.conv, self.conv_bias, views["conv"], batch)
        return linear(c * mixed, self.out, self.out_bias)


def reference(facts: ShortConvFacts, weights: Names, x: Tensor, whole: WholeContext) -> Tensor:
    """The short convolution over a whole sequence, token by token, in plain torch."""
    f, w = facts, weights.scope(facts.prefix)
    b, c, inner = w.linear("in_proj", x).chunk(3, dim=-1)
    nothing = x.new_zeros(f.kernel - 1, x.shape[1])
    mixed, _ = conv_reference.scan(b * inner, w["conv.weight"][:, 0], w.get("conv.bias"), nothing)
    return w.linear("out_proj", c * mixed)
