"""Gated delta net: a short convolution over queries, keys and values, then the gated delta rule on a state per head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.models.facts import NormFacts, fact
from kvlab.models.modules.activation import activation
from kvlab.models.modules.base import Place, StepContext, WholeContext
from kvlab.models.modules.norm import Norm
from kvlab.models.modules.norm import reference as norm_reference
from kvlab.models.weights import Names, Scope
from kvlab.ops.conv1d import causal_conv1d
from kvlab.ops.conv1d import reference as conv_reference
from kvlab.ops.gated_delta import DeltaRows, gated_delta
from kvlab.ops.gated_delta import reference as delta_reference
from kvlab.ops.linear import linear

UNIT_EPS = 1e-6
"""Added to the squared length that queries and keys are divided by the root of."""


@dataclass(frozen=True)
class GatedDeltaFacts:
    """A gated delta net. The factor on queries is key_dim ** -0.5; the norm that follows takes it out again.

    Canonical names within `prefix`: `in_proj_q`, `_k`, `_v` (or one `in_proj_qkv`), `in_proj_z` the gate of the output,
    `in_proj_b` and `in_proj_a` per value head; `conv1d.weight` [channels, 1, kernel] over q, k and v; `dt_bias`,
    `A_log`; `norm.weight` [value_dim]; `out_proj`.

    Attributes:
        num_key_heads, num_value_heads, key_dim, value_dim: each key head serves as many value heads in a row.
        kernel: tokens that the convolution reads.
        activation: after the convolution, and of the gate.
        norm: of each value head's result, before its gate.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    activation: str = fact("activation", "silu")
    norm: NormFacts = NormFacts()  # noqa: RUF009
    prefix: str = "linear_attn"

    @property
    def rows(self) -> dict[str, int]:
        """Rows of the projections that the convolution runs over."""
        keys = self.num_key_heads * self.key_dim
        return {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": self.num_value_heads * self.value_dim}


class GatedDelta:
    """Call it on [T, hidden]; keeps the convolution's last inputs and a [key_dim, value_dim] matrix per value head."""

    num_parts = 1

    def __init__(self, facts: GatedDeltaFacts, source: Scope, hidden: int, place: Place) -> None:
        f, scope = facts, source.scope(facts.prefix)
        self.facts, self.place, self.activate = f, place, activation(f.activation)
        heads, values, channels = f.num_value_heads, f.rows["in_proj_v"], sum(f.rows.values())
        self.qkv = scope.take_rows("in_proj_qkv.weight", {f"{n}.weight": r for n, r in f.rows.items()}, hidden)
        others = {"in_proj_z.weight": values, "in_proj_b.weight": heads, "in_proj_a.weight": heads}
        self.zba = scope.take_rows("in_proj_zba.weight", others, hidden)
        self.conv = scope.take("conv1d.weight", channels, 1, f.kernel)[:, 0]
        self.dt_bias, self.a_log = scope.take("dt_bias", heads), scope.take("A_log", heads)
        self.norm = Norm(f.norm, scope, "norm", f.value_dim)
        self.out = scope.take("out_proj.weight", hidden, values)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[T, hidden] of `x` [T, hidden]."""
        f = self.facts
        views, batch = step.part(self.place)
        mixed = self.activate(causal_conv1d(linear(x, self.qkv), self.conv, None, views["conv"], batch))
        z, b, a = linear(x, self.zba).split([f.rows["in_proj_v"], f.num_value_heads, f.num_value_heads], dim=-1)
        rows = _delta_rows(f, mixed, b, log_decay(a, self.dt_bias, self.a_log)[..., None])
        out = gated_delta(rows, views["state"], batch, scale=f.key_dim**-0.5)
        gated = self.norm(out) * self.activate(z.unflatten(-1, out.shape[1:]))
        return linear(gated.flatten(1), self.out)


def log_decay(a: Tensor, dt_bias: Tensor, a_log: Tensor) -> Tensor:
    """The logarithm of what remains of a state, at least fp32: -exp(a_log) * softplus(a + dt_bias)."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return -a_log.to(wide).exp() * F.softplus(a.to(wide) + dt_bias.to(wide))


def unit(x: Tensor) -> Tensor:
    """`x` with each row of its last axis brought to length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + UNIT_EPS)


def _delta_rows(f: GatedDeltaFacts, mixed: Tensor, b: Tensor, decay: Tensor) -> DeltaRows:
    query, key, value = mixed.split(list(f.rows.values()), dim=-1)
    query, key = (unit(x.unflatten(-1, (-1, f.key_dim))) for x in (query, key))
    return DeltaRows(query, key, value.unflatten(-1, (-1, f.value_dim)), decay, b.sigmoid())


def reference(facts: GatedDeltaFacts, weights: Names, x: Tensor, whole: WholeContext) -> Tensor:
    """The gated delta net over a whole sequence, token by token, in plain torch."""
    f, w, act = facts, weights.scope(facts.prefix), activation(facts.activation)
    qkv = torch.cat([w.linear(name, x) for name in f.rows], dim=-1)
    nothing = x.new_zeros(f.kernel - 1, qkv.shape[1])
    mixed = act(conv_reference.scan(qkv, w["conv1d.weight"][:, 0], None, nothing)[0])
    decay = log_decay(w.linear("in_proj_a", x), w["dt_bias"], w["A_log"])[..., None]
    rows = _delta_rows(f, mixed, w.linear("in_proj_b", x), decay)
    query, key = (r.repeat_interleave(f.num_value_heads // f.num_key_heads, dim=1) for r in (rows.query, rows.key))
    state = x.new_zeros(f.num_value_heads, f.key_dim, f.value_dim)
    inputs = (query * f.key_dim**-0.5, key, rows.value, rows.log_decay, rows.beta)
    out = norm_reference(f.norm, w, "norm", delta_reference.scan(inputs, state)[0])
    return w.linear("out_proj", (out * act(w.linear("in_proj_z", x).unflatten(-1, out.shape[1:]))).flatten(1))
