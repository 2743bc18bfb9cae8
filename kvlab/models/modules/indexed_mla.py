"""DeepSeek sparse attention: latent attention in which each token reads only the positions that an indexer chose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.models.facts import NormFacts, RopeFacts, fact
from kvlab.models.modules.base import Place, StepContext, WholeContext
from kvlab.models.modules.mla import LatentAttention, LatentAttentionFacts, reference_attend, reference_heads
from kvlab.models.modules.norm import Norm
from kvlab.models.modules.norm import reference as norm_reference
from kvlab.models.rope import rotate
from kvlab.models.weights import Names, Scope
from kvlab.ops.index_topk import index_topk
from kvlab.ops.linear import linear
from kvlab.ops.mla_attention import mla_attention, selected_attention
from kvlab.ops.write_rows import write_rows


@dataclass(frozen=True)
class IndexerFacts:
    """The indexer: its heads' queries come from the queries' latent, its one key per token from the stream.

    Attributes:
        num_heads, dim: of queries; keys have one head. top_k: positions that a token keeps.
        rope: of the first `rope_dim` values. norm: of keys.
    """

    num_heads: int
    dim: int
    rope_dim: int
    top_k: int = fact("length", 0)
    rope: RopeFacts | None = fact("off", None)  # noqa: RUF009
    norm: NormFacts = NormFacts("layer", 1e-6, bias=True)  # noqa: RUF009


@dataclass(frozen=True)
class IndexedAttentionFacts:
    """Latent attention over what its indexer chooses; it caches latents and index keys."""

    attention: LatentAttentionFacts
    index: IndexerFacts


@dataclass(frozen=True)
class ReusedIndexFacts:
    """Latent attention over what the indexer of layer `source` chose for the same token; it caches no index keys."""

    attention: LatentAttentionFacts
    source: int


class Indexer:
    """Chooses positions for each token of a step; writes the step's index keys."""

    def __init__(self, facts: IndexerFacts, scope: Scope, hidden: int, query_rank: int) -> None:
        f = self.facts = facts
        self.query = scope.take("wq_b.weight", f.num_heads * f.dim, query_rank)
        self.key = scope.take("wk.weight", f.dim, hidden)
        self.norm = Norm(f.norm, scope, "k_norm", f.dim)
        self.weights = scope.take("weights_proj.weight", f.num_heads, hidden)

    def __call__(self, x: Tensor, residual: Tensor, step: StepContext, place: tuple[Place, int]) -> Tensor | None:
        """int64 [T, k], the chosen positions; None where every token sees no more than `top_k` anyway.

        Args:
            x: [T, hidden]. residual: the queries' latent [T, query_rank]. place: of the index keys.
        """
        f, wide = self.facts, torch.promote_types(x.dtype, torch.float32)
        views, batch = step.part(*place)
        key = self.norm(linear(x, self.key))[:, None]
        angles = None if f.rope is None else step.angles(f.rope, f.rope_dim)
        if f.rope is not None and angles is not None:
            key = rotate(key, *angles, f.rope.interleaved)
        write_rows({"index": key[:, 0]}, views, batch.slot_mapping)
        if batch.max_seq_len <= f.top_k:
            return None
        query = linear(residual, self.query).unflatten(-1, (f.num_heads, f.dim))
        if f.rope is not None and angles is not None:
            query = rotate(query, *angles, f.rope.interleaved)
        return index_topk(query.to(wide), linear(x, self.weights).to(wide), views, batch, top_k=f.top_k)


class IndexedAttention:
    """Latents and index keys; call it on [T, hidden]."""

    num_parts = 2

    def __init__(self, facts: IndexedAttentionFacts, source: Scope, hidden: int, place: Place) -> None:
        f = facts.attention
        self.attention, self.place = LatentAttention(f, source, hidden, place), place
        self.indexer = Indexer(facts.index, source.scope(f"{f.prefix}.indexer"), hidden, f.query_rank)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[T, hidden] of `x` [T, hidden], the normed residual stream."""

        def choose(residual: Tensor) -> Tensor | None:
            chosen = self.indexer(x, residual, step, (self.place, 1))
            step.memory["chosen", self.place.layer] = chosen
            return chosen

        return attend(self.attention, x, step, choose)


class ReusedIndexAttention:
    """Latents alone; which of them are read an earlier layer chose."""

    num_parts = 1

    def __init__(self, facts: ReusedIndexFacts, source: Scope, hidden: int, place: Place) -> None:
        self.attention, self.source = LatentAttention(facts.attention, source, hidden, place), facts.source

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[T, hidden] of `x` [T, hidden], the normed residual stream."""
        return attend(self.attention, x, step, lambda residual: step.memory["chosen", self.source])


def attend(attention: LatentAttention, x: Tensor, step: StepContext, choose) -> Tensor:  # type: ignore[no-untyped-def]
    """[T, hidden]; `choose` gives the positions [T, k] from the queries' latent, None for all of them."""
    views, batch = step.part(attention.place)
    query, latent, rope, residual = attention.project(x, step)
    write_rows({"latent": latent, "rope": rope}, views, batch.slot_mapping)
    chosen, scale = choose(residual), attention.facts.scale
    if chosen is None:
        return attention.finish(mla_attention(query, attention.up, views, batch, scale=scale))
    return attention.finish(selected_attention(query, attention.up, views, batch, chosen, scale=scale))


def reference(facts: IndexedAttentionFacts, weights: Names, x: Tensor, whole: WholeContext) -> Tensor:
    """Every token's query against the keys that score best for it, in plain torch."""
    query, key, value, residual = reference_heads(facts.attention, weights, x, whole)
    w = weights.scope(facts.attention.prefix).scope("indexer")
    seen = reference_choice(facts.index, w, (x, residual), whole)
    whole.memory["chosen", whole.layer] = seen
    return reference_attend(facts.attention, weights, (query, key, value), seen)


def reference_reused(facts: ReusedIndexFacts, weights: Names, x: Tensor, whole: WholeContext) -> Tensor:
    """As `reference`, with the choice of an earlier layer."""
    heads = reference_heads(facts.attention, weights, x, whole)[:3]
    return reference_attend(facts.attention, weights, heads, whole.memory["chosen", facts.source])


def reference_choice(f: IndexerFacts, w: Names, inputs: tuple[Tensor, Tensor], whole: WholeContext) -> Tensor:
    """bool [T, T]: which keys each token chose; `inputs` are the stream and the queries' latent."""
    x, residual = inputs
    query = w.linear("wq_b", residual).unflatten(-1, (f.num_heads, f.dim))
    key = norm_reference(f.norm, w, "k_norm", w.linear("wk", x))[:, None]
    if f.rope is not None:
        angles = whole.angles(f.rope, f.rope_dim, x.dtype)
        query, key = (rotate(rows, *angles, f.rope.interleaved) for rows in (query, key))
    products = torch.einsum("thd,sd->ths", query, key[:, 0]).relu()
    scores = torch.einsum("ths,th->ts", products, w.linear("weights_proj", x))
    seen = torch.zeros(len(x), len(x), dtype=torch.bool)
    for t in range(len(x)):
        best = scores[t, : t + 1].argsort(descending=True, stable=True)[: f.top_k]
        seen[t, best] = True
    return seen
