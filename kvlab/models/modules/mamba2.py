"""Mamba-2: a short convolution, then a recurrence in which one number per head and token fades the head's state."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.models.facts import fact
from kvlab.models.modules.activation import activation
from kvlab.models.modules.base import Place, StepContext, WholeContext
from kvlab.models.weights import Names, Scope
from kvlab.ops.conv1d import causal_conv1d
from kvlab.ops.conv1d import reference as conv_reference
from kvlab.ops.linear import linear
from kvlab.ops.ssd import SSDRows, ssd
from kvlab.ops.ssd import reference as ssd_reference


@dataclass(frozen=True)
class GatedNormFacts:
    """An RMS norm of the result over each of `groups` stretches of it, before or after the gate."""

    eps: float = fact("twice", 1e-5)
    groups: int = fact("halved or doubled", 1)
    before_gate: bool = fact("flip", False)


@dataclass(frozen=True)
class Mamba2Facts:
    """A Mamba-2 mixer.

    Canonical names within `prefix`: `in_proj` with the rows of gate, x, B, C and step after one another; `conv1d` over
    x, B and C; `A_log`, `D` and `dt_bias` per head; `norm.weight`; `out_proj`.

    Attributes:
        num_heads, head_dim: of the recurrence; their product is the inner width.
        num_groups: each group of B and C serves num_heads / num_groups heads in a row.
        state_size: values of B and C.
        kernel: tokens that the convolution reads.
        activation: after the convolution; the gate's is SiLU.
        norm: of the result; None for none.
        conv_bias, bias: of the convolution, and of in_proj and out_proj.
        dt_min, dt_max: between which steps are held.
        gate_scale, x_scale, b_scale, c_scale, dt_scale: factors on what in_proj gives (Falcon-H1).

    Raises:
        ValueError: groups that do not divide the heads, or groups of the norm that do not divide the inner width.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel: int
    activation: str = fact("activation", "silu")
    norm: GatedNormFacts | None = fact("off", None)  # noqa: RUF009
    conv_bias: bool = True
    bias: bool = False
    dt_min: float = fact("scale", 0.0)
    dt_max: float = fact("scale if set", math.inf)
    gate_scale: float = fact("scale if set", 1.0)
    x_scale: float = fact("scale if set", 1.0)
    b_scale: float = fact("scale if set", 1.0)
    c_scale: float = fact("scale if set", 1.0)
    dt_scale: float = fact("scale if set", 1.0)
    prefix: str = "mamba"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise ValueError(f"n_groups {self.num_groups}: must divide the {self.num_heads} heads of Mamba-2")
        if self.norm is not None and self.inner % self.norm.groups:
            raise ValueError(f"groups {self.norm.groups} of the norm: must divide the inner width of {self.inner}")

    @property
    def inner(self) -> int:
        """Values of x and of the gate."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def scales(self) -> list[tuple[int, float]]:
        """(rows, factor) of each piece of in_proj."""
        group = self.num_groups * self.state_size
        rows = (self.inner, self.inner, group, group, self.num_heads)
        return list(zip(rows, (self.gate_scale, self.x_scale, self.b_scale, self.c_scale, self.dt_scale), strict=True))


class Mamba2:
    """Call it on [T, hidden]; keeps the convolution's last inputs and a [head_dim, state_size] matrix per head."""

    num_parts = 1

    def __init__(self, facts: Mamba2Facts, source: Scope, hidden: int, place: Place) -> None:
        f, scope = facts, source.scope(facts.prefix)
        self.facts, self.place, self.activate = f, place, activation(f.activation)
        rows = f.inner + f.channels + f.num_heads
        self.into = scope.take("in_proj.weight", rows, hidden)
        self.into_bias = scope.take("in_proj.bias", rows) if f.bias else None
        self.conv = scope.take("conv1d.weight", f.channels, 1, f.kernel)[:, 0]
        self.conv_bias = scope.take("conv1d.bias", f.channels) if f.conv_bias else None
        self.heads = tuple(scope.take(name, f.num_heads) for name in ("A_log", "D", "dt_bias"))
        self.norm = scope.take("norm.weight", f.inner) if f.norm else None
        self.out = scope.take("out_proj.weight", hidden, f.inner)
        self.out_bias = scope.take("out_proj.bias", hidden) if f.bias else None
        factors = torch.cat([torch.full((n,), s, dtype=scope.dtype) for n, s in f.scales]).to(scope.device)
        self.factors = None if all(s == 1.0 for _, s in f.scales) else factors

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[T, hidden] of `x` [T, hidden]."""
        f = self.facts
        views, batch = step.part(self.place)
        projected = linear(x, self.into, self.into_bias)
        projected = projected if self.factors is None else projected * self.factors
        gate, mixed, dt = projected.split([f.inner, f.channels, f.num_heads], dim=-1)
        mixed = self.activate(causal_conv1d(mixed, self.conv, self.conv_bias, views["conv"], batch))
        a_log, skip, dt_bias = self.heads
        rows = _rows(f, mixed, steps(f, dt, dt_bias))
        out = ssd(rows, decay(a_log), views["state"], batch) + skip[:, None] * rows.x
        return linear(_gated(f, out.flatten(1), gate, self.norm), self.out, self.out_bias)


def decay(a_log: Tensor) -> Tensor:
    """A: how fast states fade, negative, at least fp32."""
    return -a_log.to(torch.promote_types(a_log.dtype, torch.float32)).exp()


def steps(f: Mamba2Facts, dt: Tensor, dt_bias: Tensor) -> Tensor:
    """How far time moves on, [T, heads], at least fp32: softplus(dt + dt_bias), held between dt_min and dt_max."""
    wide = torch.promote_types(dt.dtype, torch.float32)
    return F.softplus(dt.to(wide) + dt_bias.to(wide)).clamp(f.dt_min, f.dt_max)


def _rows(f: Mamba2Facts, mixed: Tensor, dt: Tensor) -> SSDRows:
    group = f.num_groups * f.state_size
    x, b, c = mixed.split([f.inner, group, group], dim=-1)
    b, c = (v.unflatten(-1, (f.num_groups, f.state_size)) for v in (b, c))
    return SSDRows(x.unflatten(-1, (f.num_heads, f.head_dim)), dt, b, c)


def _gated(f: Mamba2Facts, out: Tensor, gate: Tensor, weight: Tensor | None) -> Tensor:
    """`out` [T, inner] normed and gated, in the order of the facts."""
    if f.norm is None or weight is None:
        return out * F.silu(gate)
    out = out if f.norm.before_gate else out * F.silu(gate)
    wide = out.to(torch.promote_types(out.dtype, torch.float32)).unflatten(-1, (f.norm.groups, -1))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + f.norm.eps)
    out = normed.flatten(-2).to(out.dtype) * weight
    return out * F.silu(gate) if f.norm.before_gate else out


def reference(facts: Mamba2Facts, weights: Names, x: Tensor, whole: WholeContext) -> Tensor:
    """The mixer over a whole sequence, token by token, in plain torch."""
    f, w = facts, weights.scope(facts.prefix)
    factors = torch.cat([torch.full((n,), s, dtype=x.dtype) for n, s in f.scales])
    gate, mixed, dt = (w.linear("in_proj", x) * factors).split([f.inner, f.channels, f.num_heads], dim=-1)
    nothing = x.new_zeros(f.kernel - 1, f.channels)
    mixed = conv_reference.scan(mixed, w["conv1d.weight"][:, 0], w.get("conv1d.bias"), nothing)[0]
    rows = _rows(f, activation(f.activation)(mixed), steps(f, dt, w["dt_bias"]))
    state = x.new_zeros(f.num_heads, f.head_dim, f.state_size)
    out, _ = ssd_reference.scan((rows.x, rows.dt, rows.b, rows.c), decay(w["A_log"]), state)
    out = (out + w["D"][:, None] * rows.x).flatten(1)
    return w.linear("out_proj", _gated(f, out, gate, w.get("norm.weight")))
