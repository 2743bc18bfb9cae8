"""Kimi delta attention: the gated delta rule with a decay per channel, its gates projected through few dimensions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.models.facts import NormFacts, fact
from kvlab.models.modules.activation import activation
from kvlab.models.modules.base import Place, StepContext, WholeContext
from kvlab.models.modules.gated_delta import log_decay, unit
from kvlab.models.modules.norm import Norm
from kvlab.models.modules.norm import reference as norm_reference
from kvlab.models.weights import Names, Scope
from kvlab.ops.conv1d import causal_conv1d
from kvlab.ops.conv1d import reference as conv_reference
from kvlab.ops.gated_delta import DeltaRows, gated_delta
from kvlab.ops.gated_delta import reference as delta_reference
from kvlab.ops.linear import linear


@dataclass(frozen=True)
class KDAFacts:
    """Kimi delta attention. The factor on queries is head_dim ** -0.5; the norm that follows takes it out again.

    Canonical names within `prefix`: `q_proj`, `k_proj`, `v_proj`; `q_conv1d`, `k_conv1d`, `v_conv1d` (or one `conv1d`)
    [channels, 1, kernel]; `f_a_proj`, `f_b_proj`, `dt_bias` [heads * head_dim] and `A_log` [heads] of the decay;
    `b_proj`; `g_a_proj` and `g_b_proj` of the output's gate; `o_norm` [head_dim]; `o_proj`.

    Attributes:
        num_heads, head_dim: of queries, keys, values and gates; head_dim is also what gates are projected through.
        kernel: tokens that the convolution reads.
        activation: after the convolution. gate: of the output.
        norm: of each head's result, before its gate.
    """

    num_heads: int
    head_dim: int
    kernel: int
    activation: str = fact("activation", "silu")
    gate: str = fact("activation", "sigmoid")
    norm: NormFacts = NormFacts()  # noqa: RUF009
    prefix: str = "self_attn"

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim


class KDA:
    """Call it on [T, hidden]; keeps the convolution's last inputs and a [head_dim, head_dim] matrix per head."""

    num_parts = 1

    def __init__(self, facts: KDAFacts, source: Scope, hidden: int, place: Place) -> None:
        f, scope = facts, source.scope(facts.prefix)
        self.facts, self.place = f, place
        self.activate, self.gate = activation(f.activation), activation(f.gate)
        self.qkv = scope.take_rows("qkv_proj.weight", {f"{n}_proj.weight": f.width for n in "qkv"}, hidden)
        convolutions = {f"{n}_conv1d.weight": f.width for n in "qkv"}
        self.conv = scope.take_rows("conv1d.weight", convolutions, 1, f.kernel)[:, 0]
        narrow = {"f_a_proj.weight": f.head_dim, "g_a_proj.weight": f.head_dim, "b_proj.weight": f.num_heads}
        self.narrow = scope.take_rows("fgb_proj.weight", narrow, hidden)
        self.f_b = scope.take("f_b_proj.weight", f.width, f.head_dim)
        self.g_b = scope.take("g_b_proj.weight", f.width, f.head_dim)
        self.dt_bias, self.a_log = scope.take("dt_bias", f.width), scope.take("A_log", f.num_heads)
        self.norm = Norm(f.norm, scope, "o_norm", f.head_dim)
        self.out = scope.take("o_proj.weight", hidden, f.width)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[T, hidden] of `x` [T, hidden]."""
        f = self.facts
        views, batch = step.part(self.place)
        mixed = self.activate(causal_conv1d(linear(x, self.qkv), self.conv, None, views["conv"], batch))
        forget, gate, b = linear(x, self.narrow).split([f.head_dim, f.head_dim, f.num_heads], dim=-1)
        rows = _delta_rows(f, mixed, b, _decay(f, linear(forget.contiguous(), self.f_b), self.dt_bias, self.a_log))
        out = gated_delta(rows, views["state"], batch, scale=f.head_dim**-0.5)
        gated = self.norm(out) * self.gate(linear(gate.contiguous(), self.g_b)).unflatten(-1, (-1, f.head_dim))
        return linear(gated.flatten(1), self.out)


def _decay(f: KDAFacts, forget: Tensor, dt_bias: Tensor, a_log: Tensor) -> Tensor:
    """Logarithm of what remains per channel, [T, H, D]."""
    heads = (f.num_heads, f.head_dim)
    return log_decay(forget.unflatten(-1, heads), dt_bias.unflatten(-1, heads), a_log[:, None])


def _delta_rows(f: KDAFacts, mixed: Tensor, b: Tensor, decay: Tensor) -> DeltaRows:
    query, key, value = (x.unflatten(-1, (-1, f.head_dim)) for x in mixed.chunk(3, dim=-1))
    return DeltaRows(unit(query), unit(key), value, decay, b.sigmoid())


def reference(facts: KDAFacts, weights: Names, x: Tensor, whole: WholeContext) -> Tensor:
    """Kimi delta attention over a whole sequence, token by token, in plain torch."""
    f, w = facts, weights.scope(facts.prefix)
    qkv = torch.cat([w.linear(f"{n}_proj", x) for n in "qkv"], dim=-1)
    taps = torch.cat([w[f"{n}_conv1d.weight"][:, 0] for n in "qkv"])
    mixed = activation(f.activation)(conv_reference.scan(qkv, taps, None, x.new_zeros(f.kernel - 1, 3 * f.width))[0])
    forget = w.linear("f_b_proj", w.linear("f_a_proj", x))
    rows = _delta_rows(f, mixed, w.linear("b_proj", x), _decay(f, forget, w["dt_bias"], w["A_log"]))
    inputs = (rows.query * f.head_dim**-0.5, rows.key, rows.value, rows.log_decay, rows.beta)
    out, _ = delta_reference.scan(inputs, x.new_zeros(f.num_heads, f.head_dim, f.head_dim))
    gate = activation(f.gate)(w.linear("g_b_proj", w.linear("g_a_proj", x))).unflatten(-1, (-1, f.head_dim))
    return w.linear("o_proj", (norm_reference(f.norm, w, "o_norm", out) * gate).flatten(1))
