"""Attention without a softmax, kept as one matrix per head: linear attention, retention, lightning attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.models.facts import NormFacts, RopeFacts, fact
from kvlab.models.modules.activation import activation
from kvlab.models.modules.base import Place, StepContext, WholeContext
from kvlab.models.modules.norm import Norm
from kvlab.models.modules.norm import reference as norm_reference
from kvlab.models.rope import rotate
from kvlab.models.weights import Names, Scope
from kvlab.ops.linear import linear
from kvlab.ops.linear_attention import linear_attention


@dataclass(frozen=True)
class LinearAttentionFacts:
    """Linear attention; names within `prefix`: `q_proj`, `k_proj`, `v_proj`, `gate_proj`, `norm`, `o_proj`.

    Attributes:
        num_heads, key_dim, value_dim: of the matrices that are kept.
        log_decays: one per head and not positive; empty where nothing decays. decay: factor on them.
        scale: factor on queries. No fact of its own where a norm or a sum divides by it again.
        activation: of queries, keys and values, "" for none.
        positive: whether queries and keys pass through elu(x) + 1.
        normalised: whether a query divides by what it would read were all values one; a state has one more column then.
        rope: None where queries and keys do not rotate.
        norm: of each head's result, or of all heads at once when `norm_wide`; None for none.
        gate: activation of a projection that multiplies the result, "" for none.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    log_decays: tuple[float, ...] = ()
    decay: float = fact("scale", 0.0)
    scale: float = 1.0
    activation: str = fact("activation", "")
    positive: bool = fact("off", False)
    normalised: bool = False  # a column of the state: no mutation of an unchanged cache
    rope: RopeFacts | None = fact("off", None)  # noqa: RUF009
    norm: NormFacts | None = None
    norm_wide: bool = False
    gate: str = fact("activation", "")
    prefix: str = "self_attn"

    @property
    def decays(self) -> Tensor:
        """Logarithm of what remains of each head's state after a token, fp64 [num_heads]."""
        kept = torch.tensor(self.log_decays or (0.0,) * self.num_heads, dtype=torch.float64)
        return self.decay * kept


class LinearAttention:
    """Call it on [T, hidden]; keeps a [key_dim, value_dim] matrix per head."""

    num_parts = 1

    def __init__(self, facts: LinearAttentionFacts, source: Scope, hidden: int, place: Place) -> None:
        f, scope = facts, source.scope(facts.prefix)
        self.facts, self.place = f, place
        keys, values = f.num_heads * f.key_dim, f.num_heads * f.value_dim
        rows = {"q_proj.weight": keys, "k_proj.weight": keys, "v_proj.weight": values}
        self.qkv = scope.take_rows("qkv_proj.weight", rows, hidden)
        self.log_decay = f.decays.to(scope.device)
        self.gate = scope.take("gate_proj.weight", values, hidden) if f.gate else None
        self.norm = Norm(f.norm, scope, "norm", values if f.norm_wide else f.value_dim) if f.norm else None
        self.out = scope.take("o_proj.weight", hidden, values)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[T, hidden] of `x` [T, hidden]."""
        f = self.facts
        views, batch = step.part(self.place)
        angles = step.angles(f.rope, f.key_dim) if f.rope else None
        rows = _rows(f, linear(x, self.qkv), angles)
        out = _divided(f, linear_attention(rows, self.log_decay, views["state"], batch))
        if self.norm is not None:
            out = self.norm(out.flatten(1).contiguous() if f.norm_wide else out.contiguous())
        out = out.reshape(len(x), -1)
        return linear(out if self.gate is None else out * activation(f.gate)(linear(x, self.gate)), self.out)


def _rows(f: LinearAttentionFacts, qkv: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key [T, H, Dk] and value [T, H, Dv] as the recurrence reads them."""
    qkv = activation(f.activation)(qkv) if f.activation else qkv
    keys = f.num_heads * f.key_dim
    query, key, value = (
        p.unflatten(-1, (f.num_heads, -1)) for p in qkv.split([keys, keys, qkv.shape[1] - 2 * keys], -1)
    )
    if angles is not None and f.rope is not None:
        query, key = (rotate(p, *angles, f.rope.interleaved) for p in (query, key))
    if f.positive:
        query, key = F.elu(query) + 1, F.elu(key) + 1
    if f.normalised:
        value = F.pad(value, (0, 1), value=1.0)
    return query * f.scale, key, value


def _divided(f: LinearAttentionFacts, out: Tensor) -> Tensor:
    """Values [..., value_dim] of what queries read; zeros of a padded row, whose sum of scores is zero."""
    if not f.normalised:
        return out
    total = out[..., -1:]
    return torch.where(total != 0, out[..., :-1] / total, 0)


def reference(facts: LinearAttentionFacts, weights: Names, x: Tensor, whole: WholeContext) -> Tensor:
    """The parallel form, in plain torch: every token's score with every earlier one, a square per head."""
    f, w = facts, weights.scope(facts.prefix)
    qkv = torch.cat([w.linear(f"{n}_proj", x) for n in "qkv"], dim=-1)
    angles = whole.angles(f.rope, f.key_dim, x.dtype) if f.rope else None
    query, key, value = _rows(f, qkv, angles)
    distance = whole.positions[:, None] - whole.positions[None, :]
    remains = torch.exp(f.decays.to(x.dtype)[:, None, None] * distance.clamp(min=0)) * (distance >= 0)
    scores = torch.einsum("thd,shd->hts", query, key) * remains
    out = _divided(f, torch.einsum("hts,shd->thd", scores, value))
    if f.norm is not None:
        out = norm_reference(f.norm, w, "norm", out.flatten(1) if f.norm_wide else out)
    out = out.reshape(len(x), -1)
    return w.linear("o_proj", out * activation(f.gate)(w.linear("gate_proj", x)) if f.gate else out)
