"""Mamba: a short convolution, then a recurrence in which every channel's state fades at rates of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.models.facts import NormFacts, fact
from kvlab.models.modules.activation import activation
from kvlab.models.modules.base import Place, StepContext, WholeContext
from kvlab.models.modules.mamba2 import decay
from kvlab.models.modules.norm import Norm
from kvlab.models.modules.norm import reference as norm_reference
from kvlab.models.weights import Names, Scope
from kvlab.ops.conv1d import causal_conv1d
from kvlab.ops.conv1d import reference as conv_reference
from kvlab.ops.linear import linear
from kvlab.ops.selective_scan import ScanRows, selective_scan
from kvlab.ops.selective_scan import reference as scan_reference

NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


@dataclass(frozen=True)
class Mamba1Facts:
    """A Mamba mixer.

    Canonical names within `prefix`: `in_proj` with the rows of x and then of the gate; `conv1d`; `x_proj` with the rows
    of step, B and C; `dt_proj`; `A_log` [inner, state_size]; `D`; `out_proj`; `dt_layernorm`, `b_layernorm`,
    `c_layernorm` where there is a norm with a weight.

    Attributes:
        inner: channels. state_size: values of state per channel. kernel: tokens that the convolution reads.
        dt_rank: values from which the steps of all channels are projected.
        activation: after the convolution; the gate's is SiLU.
        norm: of the step's values, B and C; None for none.
        conv_bias, bias: of the convolution, and of in_proj and out_proj.
    """

    inner: int
    state_size: int
    kernel: int
    dt_rank: int
    activation: str = fact("activation", "silu")
    norm: NormFacts | None = fact("off", None)  # noqa: RUF009
    conv_bias: bool = True
    bias: bool = False
    prefix: str = "mamba"

    @property
    def selected(self) -> list[int]:
        """Rows of x_proj: step, B, C."""
        return [self.dt_rank, self.state_size, self.state_size]


class Mamba1:
    """Call it on [T, hidden]; keeps the convolution's last inputs and `state_size` values per channel."""

    num_parts = 1

    def __init__(self, facts: Mamba1Facts, source: Scope, hidden: int, place: Place) -> None:
        f, scope = facts, source.scope(facts.prefix)
        self.facts, self.place, self.activate = f, place, activation(f.activation)
        self.into = scope.take("in_proj.weight", 2 * f.inner, hidden)
        self.into_bias = scope.take("in_proj.bias", 2 * f.inner) if f.bias else None
        self.conv = scope.take("conv1d.weight", f.inner, 1, f.kernel)[:, 0]
        self.conv_bias = scope.take("conv1d.bias", f.inner) if f.conv_bias else None
        self.select = scope.take("x_proj.weight", sum(f.selected), f.inner)
        norms = zip(NORMS, f.selected, strict=True)
        self.norms = [Norm(f.norm, scope, name, width) for name, width in norms] if f.norm else None
        self.step = scope.take("dt_proj.weight", f.inner, f.dt_rank)
        self.step_bias = scope.take("dt_proj.bias", f.inner)
        self.a_log, self.skip = scope.take("A_log", f.inner, f.state_size), scope.take("D", f.inner)
        self.out = scope.take("out_proj.weight", hidden, f.inner)
        self.out_bias = scope.take("out_proj.bias", hidden) if f.bias else None

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[T, hidden] of `x` [T, hidden]."""
        views, batch = step.part(self.place)
        mixed, gate = linear(x, self.into, self.into_bias).chunk(2, dim=-1)
        mixed = self.activate(causal_conv1d(mixed, self.conv, self.conv_bias, views["conv"], batch))
        selected = linear(mixed, self.select).split(self.facts.selected, dim=-1)
        dt, b, c = (n(s) for n, s in zip(self.norms, selected, strict=True)) if self.norms else selected
        rows = ScanRows(mixed, _steps(linear(dt, self.step), self.step_bias), b, c)
        out = selective_scan(rows, decay(self.a_log), views["state"], batch) + self.skip * mixed
        return linear(out * F.silu(gate), self.out, self.out_bias)


def _steps(dt: Tensor, bias: Tensor) -> Tensor:
    """How far time moves on, [T, inner], at least fp32."""
    wide = torch.promote_types(dt.dtype, torch.float32)
    return F.softplus(dt.to(wide) + bias.to(wide))


def reference(facts: Mamba1Facts, weights: Names, x: Tensor, whole: WholeContext) -> Tensor:
    """The mixer over a whole sequence, token by token, in plain torch."""
    f, w = facts, weights.scope(facts.prefix)
    mixed, gate = w.linear("in_proj", x).chunk(2, dim=-1)
    nothing = x.new_zeros(f.kernel - 1, f.inner)
    mixed = conv_reference.scan(mixed, w["conv1d.weight"][:, 0], w.get("conv1d.bias"), nothing)[0]
    mixed = activation(f.activation)(mixed)
    dt, b, c = w.linear("x_proj", mixed).split(f.selected, dim=-1)
    if f.norm is not None:
        dt, b, c = (norm_reference(f.norm, w, name, v) for name, v in zip(NORMS, (dt, b, c), strict=True))
    rows = (mixed, _steps(dt @ w["dt_proj.weight"].T, w["dt_proj.bias"]), b, c)
    out, _ = scan_reference.scan(rows, decay(w["A_log"]), x.new_zeros(f.inner, f.state_size))
    return w.linear("out_proj", (out + w["D"] * mixed) * F.silu(gate))
