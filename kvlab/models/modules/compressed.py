"""DeepSeek-V4's attention: a window of shared key-value rows, and beside it compressed entries, all of them or chosen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.models.facts import NormFacts, RopeFacts, fact
from kvlab.models.modules.base import Place, StepContext, WholeContext
from kvlab.models.modules.compressor import Compressor, CompressorFacts
from kvlab.models.modules.compressor import reference as reference_entries
from kvlab.models.modules.mla import turn
from kvlab.models.modules.norm import Norm
from kvlab.models.modules.norm import reference as norm_reference
from kvlab.models.weights import Names, Scope
from kvlab.ops.compressed_attention import Entries, Window, compressed_attention
from kvlab.ops.compressed_attention.rules import all_entries
from kvlab.ops.index_topk import index_topk
from kvlab.ops.linear import linear
from kvlab.ops.write_rows import write_rows


@dataclass(frozen=True)
class EntryIndexFacts:
    """The indexer of entries: it compresses index keys as entries are compressed, and keeps the best `top_k` entries."""

    compressor: CompressorFacts
    num_heads: int
    top_k: int = fact("length", 0)


@dataclass(frozen=True)
class CompressedAttentionFacts:
    """Attention of many heads over rows that are key and value at once.

    Attributes:
        rope: of the last `rope_dim` values of queries and rows; what heads see is turned back by the query's position.
        window: rows a query sees, its own included.
        norm: of rows and of the queries' latent; queries have one without weight.
        out_groups, out_rank: heads go out in groups, each through `out_rank` values of its own.
        compressor: None for a layer with nothing but its window. index: None where all entries are read.
    """

    num_heads: int
    dim: int
    rope_dim: int
    query_rank: int
    window: int = fact("length", 0)
    scale: float = fact("scale", 1.0)
    rope: RopeFacts | None = fact("off", None)  # noqa: RUF009
    norm: NormFacts = NormFacts()  # noqa: RUF009
    out_groups: int = 1
    out_rank: int = 1
    compressor: CompressorFacts | None = fact("off", None)  # noqa: RUF009
    index: EntryIndexFacts | None = fact("off", None)  # noqa: RUF009
    prefix: str = "self_attn"


class CompressedAttention:
    """Parts of the layer: the window, then entries, index keys and open buffers as far as it has them."""

    def __init__(self, facts: CompressedAttentionFacts, source: Scope, hidden: int, place: Place) -> None:
        f, scope = facts, source.scope(facts.prefix)
        self.facts, self.place = f, place
        rows = {"q_a_proj.weight": f.query_rank, "kv_proj.weight": f.dim}
        self.down = scope.take_rows("fused_a_proj.weight", rows, hidden)
        self.q_norm, self.kv_norm = Norm(f.norm, scope, "q_a_norm", f.query_rank), Norm(f.norm, scope, "kv_norm", f.dim)
        self.q_up = scope.take("q_b_proj.weight", f.num_heads * f.dim, f.query_rank)
        self.head_norm = Norm(NormFacts(eps=f.norm.eps, weight=False), scope, "q_b_norm", f.dim)
        out_in = f.num_heads * f.dim // f.out_groups
        self.out_first = scope.take("o_a_proj.weight", f.out_groups * f.out_rank, out_in)
        self.out = scope.take("o_b_proj.weight", hidden, f.out_groups * f.out_rank)
        self.sinks = scope.take("sinks", f.num_heads)
        inner = scope.scope("compressor")
        self.compressor = Compressor(f.compressor, inner, hidden, ("entry", "")) if f.compressor else None
        self.indexer = EntryIndexer(f.index, inner.scope("indexer"), hidden, f.query_rank) if f.index else None

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[T, hidden] of `x` [T, hidden]."""
        f = self.facts
        residual, rows = linear(x, self.down).split((f.query_rank, f.dim), dim=-1)
        residual, rows = self.q_norm(residual.contiguous()), self.kv_norm(rows.contiguous())[:, None]
        query = self.head_norm(linear(residual, self.q_up).unflatten(-1, (f.num_heads, f.dim)))
        angles = None if f.rope is None else step.angles(f.rope, f.rope_dim)
        if f.rope is not None and angles is not None:
            query, rows = (turn(heads, angles, f.rope) for heads in (query, rows))
        views, batch = step.part(self.place)
        write_rows({"kv": rows[:, 0]}, views, batch.slot_mapping)
        window, entries = Window(views, batch, f.window), self.entries(x, residual, step)
        seen = compressed_attention(query, batch, window, entries, scale=f.scale, sinks=self.sinks)
        if f.rope is not None and angles is not None:
            seen = turn(seen, (angles[0], -angles[1]), f.rope)
        return self.finish(seen)

    def entries(self, x: Tensor, residual: Tensor, step: StepContext) -> Entries | None:
        """What the step's tokens read besides the window, the entries that the step makes included."""
        if self.compressor is None:
            return None
        # a layer whose entries are chosen has index keys before the buffers
        part, buffer = step.part(self.place, 1), step.part(self.place, 3 if self.compressor.facts.overlap else 2)
        self.compressor(x, step, part, buffer)
        views, batch = part
        ratio = self.compressor.facts.ratio
        if self.indexer is None:
            return Entries(views, batch, all_entries(batch, ratio))
        chosen = self.indexer((x, residual), step, step.part(self.place, 2), buffer)
        return Entries(views, batch, chosen)

    def finish(self, seen: Tensor) -> Tensor:
        """[T, hidden] of what the heads saw [T, H, dim]: each group of heads through its own matrix, then all."""
        f = self.facts
        groups = seen.reshape(len(seen), f.out_groups, -1).transpose(0, 1)
        inner = torch.bmm(groups, self.out_first.unflatten(0, (f.out_groups, -1)).transpose(1, 2))
        return linear(inner.transpose(0, 1).flatten(1), self.out)


class EntryIndexer:
    """Chooses entries for each token of a step; writes the index keys of windows that close."""

    def __init__(self, facts: EntryIndexFacts, scope: Scope, hidden: int, query_rank: int) -> None:
        f = self.facts = facts
        self.compressor = Compressor(f.compressor, scope, hidden, ("index", "index_"))
        self.query = scope.take("q_b_proj.weight", f.num_heads * f.compressor.dim, query_rank)
        self.weights = scope.take("scorer.weights_proj.weight", f.num_heads, hidden)

    def __call__(self, inputs: tuple[Tensor, Tensor], step: StepContext, keys, buffer) -> Tensor:  # type: ignore[no-untyped-def]
        """int64 [T, k], the chosen entries; `inputs` are the stream [T, hidden] and the queries' latent."""
        f, (x, residual) = self.facts, inputs
        self.compressor(x, step, keys, buffer)
        query = linear(residual, self.query).unflatten(-1, (f.num_heads, -1))
        if (rope := f.compressor.rope) is not None:
            query = turn(query, step.angles(rope, f.compressor.rope_dim), rope)
        wide = torch.promote_types(x.dtype, torch.float32)
        weights = linear(x, self.weights).to(wide)
        return index_topk(query.to(wide), weights, *keys, top_k=f.top_k, ratio=f.compressor.ratio)


def reference(facts: CompressedAttentionFacts, weights: Names, x: Tensor, whole: WholeContext) -> Tensor:
    """Every token over its window and its entries, in plain torch."""
    f, w = facts, weights.scope(facts.prefix)
    residual = norm_reference(f.norm, w, "q_a_norm", w.linear("q_a_proj", x))
    query = w.linear("q_b_proj", residual).unflatten(-1, (f.num_heads, f.dim))
    query = norm_reference(NormFacts(eps=f.norm.eps, weight=False), w, "", query)
    rows = norm_reference(f.norm, w, "kv_norm", w.linear("kv_proj", x))[:, None]
    angles = None if f.rope is None else whole.angles(f.rope, f.rope_dim, x.dtype)
    if f.rope is not None and angles is not None:
        query, rows = (turn(heads, angles, f.rope) for heads in (query, rows))
    t = torch.arange(len(x))
    distance = t[:, None] - t[None, :]
    read, seen = rows[:, 0], (distance >= 0) & (distance < f.window)
    if f.compressor is not None:
        entries = reference_entries(f.compressor, w.scope("compressor"), x, whole)
        read = torch.cat((read, entries))
        seen = torch.cat((seen, _reference_choice(f, w.scope("compressor"), (x, residual), whole)), dim=1)
    scores = (torch.einsum("thd,sd->hts", query, read) * f.scale).masked_fill(~seen, float("-inf"))
    sinks = w["sinks"][:, None, None].expand(-1, len(x), 1)
    weighted = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    out = torch.einsum("hts,sd->thd", weighted, read)
    if f.rope is not None and angles is not None:
        out = turn(out, (angles[0], -angles[1]), f.rope)
    inner = torch.einsum("tgi,goi->tgo", out.reshape(len(x), f.out_groups, -1),
                         w["o_a_proj.weight"].unflatten(0, (f.out_groups, -1)))  # fmt: skip
    return w.linear("o_b_proj", inner.flatten(1))


def _reference_choice(
    f: CompressedAttentionFacts, w: Names, inputs: tuple[Tensor, Tensor], whole: WholeContext
) -> Tensor:
    """bool [T, entries]: which entries each token reads; `w` are the compressor's names."""
    (x, residual), ratio = inputs, f.compressor.ratio  # type: ignore[union-attr]
    seen = torch.zeros(len(x), len(x) // ratio, dtype=torch.bool)
    if f.index is None:
        for t in range(len(x)):
            seen[t, : (t + 1) // ratio] = True
        return seen
    inner = w.scope("indexer")
    keys = reference_entries(f.index.compressor, inner, x, whole)
    query = inner.linear("q_b_proj", residual).unflatten(-1, (f.index.num_heads, -1))
    if (rope := f.index.compressor.rope) is not None:
        query = turn(query, whole.angles(rope, f.index.compressor.rope_dim, x.dtype), rope)
    products = torch.einsum("thd,sd->ths", query, keys).relu()
    scores = torch.einsum("ths,th->ts", products, inner.linear("scorer.weights_proj", x))
    for t in range(len(x)):
        best = scores[t, : (t + 1) // ratio].argsort(descending=True, stable=True)[: f.index.top_k]
        seen[t, best] = True
    return seen
