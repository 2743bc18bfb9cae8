"""The commonest layer, fused: RMS norms, rotated grouped-query attention, gated SiLU feed-forward.

At one row each call counts, so norm and projections are one operation, and so is the whole feed-forward part.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kvlab.models.facts import AttentionFacts, LayerFacts, MLPFacts, NormFacts
from kvlab.models.modules.base import Place, StepContext
from kvlab.models.rope import rotate
from kvlab.models.weights import Scope
from kvlab.ops.attention import paged_attention
from kvlab.ops.linear import linear
from kvlab.ops.mlp import MLPWeights, mlp
from kvlab.ops.norm import rms_norm
from kvlab.ops.qkv import QKVWeights, qkv
from kvlab.ops.write_kv import write_kv


def is_plain(facts: object) -> bool:
    """Whether `PlainLayer` runs a layer of these facts."""
    if not isinstance(facts, LayerFacts) or [len(step) for step in facts.steps] != [1, 1]:
        return False
    first, second = facts.branches
    f, m = first.module, second.module
    if not isinstance(f, AttentionFacts) or not isinstance(m, MLPFacts):
        return False
    norms = (first.norm, second.norm, *([f.qk_norm] if f.qk_norm else []))
    return (
        all(isinstance(n, NormFacts) and n == NormFacts(eps=norms[0].eps) for n in norms)
        and first.post_norm is None and second.post_norm is None and first.scale == second.scale == 1.0
        and f.rope is not None and not f.rope.dim and not f.rope.interleaved and f.key_dim == f.value_dim
        and f.source is None and not (f.qk_norm_wide or f.value_norm or f.sinks or f.alibi or f.chunk or f.temperature)
        and not f.output_gate
        and m.gated and m.activation == "silu" and not m.limit and m.gate_scale == 1.0
    )  # fmt: skip


class PlainLayer:
    """A layer that `is_plain`; called like any other."""

    def __init__(self, facts: LayerFacts, source: Scope, hidden: int, index: int) -> None:
        first, second = facts.branches
        self.facts, self.place, self.eps = first.module, Place(index), first.norm.eps  # type: ignore[union-attr]
        self.qkv = self._attention(first.norm_name, source, hidden)
        self.mlp = self._mlp(second.module, second.norm_name, source, hidden)

    def _attention(self, norm_name: str, source: Scope, hidden: int) -> QKVWeights:
        f: AttentionFacts = self.facts
        norm = source.take(f"{norm_name}.weight", hidden)
        scope = source.scope(f.prefix)
        heads = {"q_proj": f.num_query_heads, "k_proj": f.num_kv_heads, "v_proj": f.num_kv_heads}
        rows = {name: n * f.key_dim for name, n in heads.items()}
        weight = scope.take_rows("qkv_proj.weight", {f"{n}.weight": r for n, r in rows.items()}, hidden)
        biased = {f"{n}.bias": r for n, r in rows.items()}
        bias = scope.take_rows("qkv_proj.bias", biased) if f.qkv_bias else None
        self.out = scope.take("o_proj.weight", hidden, rows["q_proj"])
        self.out_bias = scope.take("o_proj.bias", hidden) if f.out_bias else None
        norms = (scope.take("q_norm.weight", f.key_dim), scope.take("k_norm.weight", f.key_dim)) if f.qk_norm else None
        q_norm, k_norm = norms or (None, None)
        sizes = {"num_heads": f.num_query_heads, "num_kv_heads": f.num_kv_heads, "head_dim": f.key_dim}
        return QKVWeights(norm, weight, bias, q_norm=q_norm, k_norm=k_norm, eps=self.eps, **sizes)

    def _mlp(self, m: MLPFacts, norm_name: str, source: Scope, hidden: int) -> MLPWeights:
        norm, scope = source.take(f"{norm_name}.weight", hidden), source.scope(m.prefix)
        parts = ("gate_proj", "up_proj")
        gate_up = scope.take_rows("gate_up_proj.weight", {f"{n}.weight": m.width for n in parts}, hidden)
        gate_up_bias = scope.take_rows("gate_up_proj.bias", {f"{n}.bias": m.width for n in parts}) if m.bias else None
        down = scope.take("down_proj.weight", hidden, m.width)
        down_bias = scope.take("down_proj.bias", hidden) if m.bias else None
        return MLPWeights(norm, gate_up, down, self.eps, gate_up_bias, down_bias)

    def __call__(self, stream: Tensor, step: StepContext) -> Tensor:
        """The residual stream [T, hidden] after the layer."""
        f: AttentionFacts = self.facts
        assert f.rope is not None, "a plain layer rotates"
        views, batch = step.part(self.place)
        angles = step.angles(f.rope, f.key_dim)
        # adapters change single products: what is fused then runs one product after the other
        open_ = step.deltas is not None
        late = None if open_ else step.late_angles(f.rope, f.key_dim, stream, views)
        if open_:
            query, key, value = self._project(stream, *angles)
        else:
            query, key, value = qkv(stream, self.qkv, *angles, step.rows, turn_keys=late is None)
        write_kv(key, value, views, batch.slot_mapping, late)
        seen = paged_attention(query, views, batch, scale=f.scale, window=f.window, softcap=f.softcap)
        stream = linear(seen.reshape(len(seen), -1), self.out, self.out_bias, residual=stream)
        return self._feed(stream) if open_ else mlp(stream, self.mlp)

    def _project(self, stream: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `qkv` gives, by products of their own."""
        w = self.qkv
        rows = linear(rms_norm(stream, w.norm, self.eps), w.weight, w.bias).unflatten(-1, (-1, w.head_dim))
        query, key, value = (x.contiguous() for x in rows.split((w.num_heads, w.num_kv_heads, w.num_kv_heads), dim=1))
        if w.q_norm is not None and w.k_norm is not None:
            query, key = rms_norm(query, w.q_norm, self.eps), rms_norm(key, w.k_norm, self.eps)
        return rotate(query, cos, sin, False), rotate(key, cos, sin, False), value

    def _feed(self, stream: Tensor) -> Tensor:
        """What `mlp` gives, by products of their own."""
        w = self.mlp
        gate, up = linear(rms_norm(stream, w.norm, self.eps), w.gate_up, w.gate_up_bias).chunk(2, dim=-1)
        return linear(F.silu(gate) * up, w.down, w.down_bias, residual=stream)
