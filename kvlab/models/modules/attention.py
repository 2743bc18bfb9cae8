"""Attention over the pages of its own layer, or of the layer it shares with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvlab.models.facts import AlibiFacts, AttentionFacts, NormFacts, TemperatureFacts
from kvlab.models.modules.base import Place, StepContext, WholeContext
from kvlab.models.modules.norm import Norm
from kvlab.models.modules.norm import reference as norm_reference
from kvlab.models.rope import rotate
from kvlab.models.weights import Names, Scope
from kvlab.ops.attention import paged_attention
from kvlab.ops.linear import linear
from kvlab.ops.write_kv import write_kv


class Attention:
    """Queries of the step's tokens over the keys and values in pages.

    Attributes:
        qkv: [(Hq + Hkv) * key_dim + Hkv * value_dim, hidden]; only the query rows where another layer's cache is read.
    """

    num_parts = 1

    def __init__(self, facts: AttentionFacts, source: Scope, hidden: int, place: Place) -> None:
        f, scope = facts, source.scope(facts.prefix)
        self.facts, self.place = f, place
        self.rows = _rows(f)
        self.qkv = scope.take_rows("qkv_proj.weight", {f"{n}.weight": r for n, r in self.rows.items()}, hidden)
        biased = {f"{n}.bias": r for n, r in self.rows.items()}
        self.qkv_bias = scope.take_rows("qkv_proj.bias", biased) if f.qkv_bias else None
        self.out = scope.take("o_proj.weight", hidden, f.num_query_heads * f.value_dim)
        self.out_bias = scope.take("o_proj.bias", hidden) if f.out_bias else None
        self.q_norm = _head_norm(f, scope, "q_norm", f.num_query_heads)
        self.k_norm = None if f.source is not None else _head_norm(f, scope, "k_norm", f.num_kv_heads)
        own_values = f.value_norm is not None and f.source is None
        self.v_norm = Norm(f.value_norm, scope, "v_norm", f.value_dim) if own_values else None
        gate_rows = f.num_query_heads * f.value_dim
        self.gate = scope.take("gate_proj.weight", gate_rows, hidden) if f.output_gate else None
        self.gate_bias = scope.take("gate_proj.bias", gate_rows) if f.output_gate and f.qkv_bias else None
        self.sinks = scope.take("sinks", f.num_query_heads) if f.sinks else None
        self.alibi = alibi_slopes(f.num_query_heads, f.alibi).to(scope.device) if f.alibi else None

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[T, hidden] of `x` [T, hidden], the normed residual stream."""
        views, batch = step.part(self.place)
        f = self.facts
        late = step.late_angles(f.rope, f.key_dim, x, views) if f.source is None else None
        query, key, value = self.project(x, step, turn_keys=late is None)
        if key is not None and value is not None:
            write_kv(key, value, views, batch.slot_mapping, late)
        seen = paged_attention(
            query, views, batch, scale=f.scale, window=f.window, softcap=f.softcap,
            sinks=self.sinks, chunk=f.chunk, alibi=self.alibi,
        )  # fmt: skip
        seen = seen.reshape(len(seen), -1)
        if self.gate is not None:
            seen = seen * linear(x, self.gate, self.gate_bias).sigmoid()
        return linear(seen, self.out, self.out_bias)

    def project(
        self, x: Tensor, step: StepContext, turn_keys: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Query [T, Hq, key_dim], key and value [T, Hkv, ...], normed and rotated; None where another layer has them.

        Without `turn_keys` keys are not rotated: the cache write does it.
        """
        f = self.facts
        pieces = linear(x, self.qkv, self.qkv_bias).split(list(self.rows.values()), dim=-1)
        query = self._normed(pieces[0], self.q_norm).unflatten(-1, (-1, f.key_dim))
        key = value = None
        if len(pieces) > 1:
            key = self._normed(pieces[1], self.k_norm).unflatten(-1, (-1, f.key_dim))
            value = pieces[2].unflatten(-1, (-1, f.value_dim))
            value = value if self.v_norm is None else self.v_norm(value.contiguous())
        if f.rope is not None:
            angles = step.angles(f.rope, f.key_dim)
            query = rotate(query, *angles, f.rope.interleaved)
            key = rotate(key, *angles, f.rope.interleaved) if key is not None and turn_keys else key
        if f.temperature is not None:
            query = query * query_growth(f.temperature, step.positions, query.dtype)
        return query, key, value

    def _normed(self, rows: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return rows
        return norm(rows) if self.facts.qk_norm_wide else norm(rows.unflatten(-1, (-1, self.facts.key_dim))).flatten(-2)


def _rows(f: AttentionFacts) -> dict[str, int]:
    rows = {"q_proj": f.num_query_heads * f.key_dim}
    if f.source is None:
        rows |= {"k_proj": f.num_kv_heads * f.key_dim, "v_proj": f.num_kv_heads * f.value_dim}
    return rows


def _head_norm(f: AttentionFacts, scope: Scope, name: str, heads: int) -> Norm | None:
    if f.qk_norm is None:
        return None
    return Norm(f.qk_norm, scope, name, f.key_dim * (heads if f.qk_norm_wide else 1))


def alibi_slopes(num_heads: int, facts: AlibiFacts) -> Tensor:
    """fp32 [num_heads]: what a score loses per token of distance.

    Of a head count that is no power of two the first heads have the slopes of the next power below, the others every
    second slope of the next power above (the paper's footnote).
    """
    closest = 2 ** (num_heads.bit_length() - 1)
    slopes = [2 ** (-facts.max_bias * (i + 1) / closest) for i in range(closest)]
    slopes += [2 ** (-facts.max_bias * (i + 1) / (2 * closest)) for i in range(0, 2 * (num_heads - closest), 2)]
    return torch.tensor(slopes, dtype=torch.float32) * facts.factor


def query_growth(facts: TemperatureFacts, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, 1, 1]: what queries at `positions` [T] are multiplied with."""
    steps = (positions + facts.offset).div(facts.floor, rounding_mode="floor")
    return (1 + facts.weight * steps.to(torch.promote_types(dtype, torch.float32)).log1p()).to(dtype)[:, None, None]


def visible(num_tokens: int, window: int = 0, chunk: int = 0) -> Tensor:
    """bool [T, T]: whether the query of row t sees the key of column s.

    s <= t, and t - s < window, and s in t's chunk, as far as these are not 0.
    """
    t = torch.arange(num_tokens)
    distance = t[:, None] - t[None, :]
    seen = distance >= 0
    if window:
        seen &= distance < window
    if chunk:
        seen &= t[:, None] // chunk == t[None, :] // chunk
    return seen


def reference_heads(
    facts: AttentionFacts, weights: Names, x: Tensor, whole: WholeContext
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [T, Hq, D], key and value [T, Hkv, D] as attention gets them, in plain torch."""
    f, w = facts, weights.scope(facts.prefix)
    query = _reference_normed(f, w, "q_norm", w.linear("q_proj", x)).unflatten(-1, (-1, f.key_dim))
    angles = None if f.rope is None else whole.angles(f.rope, f.key_dim, x.dtype)
    if f.rope is not None and angles is not None:
        query = rotate(query, *angles, f.rope.interleaved)
    if f.temperature is not None:
        t = f.temperature
        grown = [1 + t.weight * math.log(1 + (int(p) + t.offset) // t.floor) for p in whole.positions]
        query = query * torch.tensor(grown, dtype=x.dtype)[:, None, None]
    if f.source is not None:
        return (query, *whole.memory["kv", f.source])
    key = _reference_normed(f, w, "k_norm", w.linear("k_proj", x)).unflatten(-1, (-1, f.key_dim))
    if f.rope is not None and angles is not None:
        key = rotate(key, *angles, f.rope.interleaved)
    value = w.linear("v_proj", x).unflatten(-1, (-1, f.value_dim))
    value = norm_reference(f.value_norm, w, "v_norm", value) if f.value_norm else value
    whole.memory["kv", whole.layer] = (key, value)
    return query, key, value


def reference(facts: AttentionFacts, weights: Names, x: Tensor, whole: WholeContext) -> Tensor:
    """Every token's query against every key it may see, in plain torch; a square of scores per head.

    Leaves the weights [Hq, T, T] in `whole.memory`.
    """
    f, w = facts, weights.scope(facts.prefix)
    query, key, value = reference_heads(f, weights, x, whole)
    queries_per_kv = query.shape[1] // key.shape[1]
    key, value = (rows.repeat_interleave(queries_per_kv, dim=1) for rows in (key, value))
    scores = torch.einsum("thd,shd->hts", query, key) * f.scale
    if f.softcap:
        scores = f.softcap * torch.tanh(scores / f.softcap)
    if f.alibi:
        distance = whole.positions[None, :] - whole.positions[:, None]
        scores = scores + alibi_slopes(f.num_query_heads, f.alibi).to(x.dtype)[:, None, None] * distance
    scores = scores.masked_fill(~visible(len(x), f.window, f.chunk), float("-inf"))
    if f.sinks:
        sinks = w["sinks"][:, None, None].expand(-1, len(x), 1)
        weighted = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    else:
        weighted = scores.softmax(-1)
    whole.memory["attention weights", whole.layer] = weighted
    seen = torch.einsum("hts,shd->thd", weighted, value).flatten(1)
    return w.linear("o_proj", seen * torch.sigmoid(w.linear("gate_proj", x)) if f.output_gate else seen)


def _reference_normed(f: AttentionFacts, w: Names, name: str, rows: Tensor) -> Tensor:
    norm: NormFacts | None = f.qk_norm
    if norm is None:
        return rows
    if f.qk_norm_wide:
        return norm_reference(norm, w, name, rows)
    return norm_reference(norm, w, name, rows.unflatten(-1, (-1, f.key_dim))).flatten(-2)
