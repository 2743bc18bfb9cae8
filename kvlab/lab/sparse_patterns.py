"""Sparse attention patterns that are fixed or found without training, as masks; what they read and what must stay.

A pattern says which positions the query at t reads. Reading few does not free the rest: a position may go only when no
later query will read it, so bytes read and bytes resident are counted apart. References, not fast paths.

Source: Longformer (arXiv 2004.05150), BigBird (arXiv 2007.14062), Reformer (arXiv 2001.04451, LSH buckets), native
sparse attention (arXiv 2502.11089). The encoders of the first two also look ahead; here every pattern is causal.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.ops.coded import decode_rows
from kvlab.ops.views import PageViews

Mask = Tensor  # bool [T, T]: whether the query of row t reads the position of column s


def _distance(tokens: int) -> Tensor:
    t = torch.arange(tokens)
    return t[:, None] - t[None, :]


def longformer(tokens: int, window: int, global_positions: Collection[int] = ()) -> Mask:
    """The last `window` positions, and the global ones, which in turn read everything before them."""
    distance = _distance(tokens)
    seen = distance < window
    chosen = torch.zeros(tokens, dtype=torch.bool)
    chosen[[p for p in global_positions if p < tokens]] = True
    return (seen | chosen[None, :] | chosen[:, None]) & (distance >= 0)


def bigbird(
    tokens: int, block: int, window: int = 3, random_blocks: int = 2, global_blocks: int = 1, seed: int = 0
) -> Mask:
    """Blocks of `block` tokens: the last `window` blocks, the first `global_blocks`, and random ones before them.

    A query's random blocks are those of its block, drawn once; so pages could be laid out by them.
    """
    blocks = -(-tokens // block)
    rng = random.Random(seed)
    seen = torch.zeros(blocks, blocks, dtype=torch.bool)
    for b in range(blocks):
        near = set(range(max(0, b - window + 1), b + 1)) | set(range(min(global_blocks, b + 1)))
        rest = [other for other in range(b + 1) if other not in near]
        chosen = (
            near
            | set(rng.sample(rest, min(random_blocks, len(rest))))
            | (set(range(b + 1)) if b < global_blocks else set())
        )
        seen[b, list(chosen)] = True
    full = seen.repeat_interleave(block, 0).repeat_interleave(block, 1)[:tokens, :tokens]
    return full & (_distance(tokens) >= 0)


def lsh_buckets(vectors: Tensor, buckets: int, rounds: int = 1, seed: int = 0) -> Tensor:
    """int64 [rounds, T]: the bucket of each vector [T, D], by the nearest of `buckets` signed random directions.

    Raises:
        ValueError: an odd number of buckets.
    """
    if buckets < 2 or buckets % 2:
        raise ValueError(f"buckets {buckets}: must be even, directions come with their opposites")
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(rounds, vectors.shape[1], buckets // 2, generator=generator, dtype=vectors.dtype)
    projected = vectors @ directions
    return torch.cat((projected, -projected), dim=-1).argmax(-1)


def lsh(vectors: Tensor, buckets: int, rounds: int = 1, seed: int = 0) -> Mask:
    """Positions that share a bucket with the query in any round, and its own; queries and keys are the same vectors."""
    found = lsh_buckets(vectors, buckets, rounds, seed)
    same = (found[:, :, None] == found[:, None, :]).any(0)
    return (same | torch.eye(len(vectors), dtype=torch.bool)) & (_distance(len(vectors)) >= 0)


@dataclass(frozen=True)
class NSA:
    """Native sparse attention's three branches; block scores of the second come from the first.

    Attributes:
        stride: a compressed entry begins every `stride` tokens. length: tokens it covers. block: tokens of a chosen
            block. top_k: blocks that a query keeps, its own and the first included. window: of the third branch.
    """

    stride: int = 4
    length: int = 8
    block: int = 8
    top_k: int = 3
    window: int = 8


def nsa_entries(tokens: int, f: NSA) -> Mask:
    """bool [T, entries]: which compressed entries each query reads: those that end at or before it."""
    count = max(0, (tokens - f.length) // f.stride + 1)
    ends = torch.arange(count) * f.stride + f.length - 1
    return ends[None, :] <= torch.arange(tokens)[:, None]


def nsa_selected(scores: Tensor, f: NSA) -> Mask:
    """The best blocks by the weights of the entries that begin in them; the first and the query's own always.

    Args:
        scores: [T, entries], the attention weights of the first branch.
    """
    tokens, entries = scores.shape
    blocks = -(-tokens // f.block)
    of_entry = torch.arange(entries) * f.stride // f.block
    seen = torch.zeros(tokens, blocks, dtype=torch.bool)
    for t in range(tokens):
        own = t // f.block
        sums = [float(scores[t, of_entry == b].sum()) for b in range(own)]
        ranked = sorted(range(1, own), key=lambda b: -sums[b])
        chosen = {0, own} | set(ranked[: max(0, f.top_k - len({0, own}))])
        seen[t, list(chosen)] = True
    return seen.repeat_interleave(f.block, 1)[:, :tokens] & (_distance(tokens) >= 0)


def window_mask(tokens: int, window: int) -> Mask:
    """The last `window` positions, the query's own included."""
    distance = _distance(tokens)
    return (distance >= 0) & (distance < window)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float) -> Tensor:
    """[T, D] of one head over what `mask` shows; a query that reads nothing gets zeros."""
    scores = (query @ key.T * scale).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) @ value


def nsa_attention(
    query: Tensor, key: Tensor, value: Tensor, gates: Tensor, f: NSA, pool: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """[T, D] of one head: compressed entries, chosen blocks and a window, weighted by `gates` [T, 3].

    Args:
        pool: from the rows [length, D] of an entry's tokens to its row; their mean where None.
    """
    tokens, scale = len(query), key.shape[1] ** -0.5
    pool = pool or (lambda rows: rows.mean(0))
    starts = range(0, tokens - f.length + 1, f.stride)
    keys, values = (
        torch.stack([pool(rows[i : i + f.length]) for i in starts]) if len(starts) else rows[:0]
        for rows in (key, value)
    )
    seen = nsa_entries(tokens, f)
    weights = (query @ keys.T * scale).masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0)
    branches = (
        weights @ values,
        masked_attention(query, key, value, nsa_selected(weights, f), scale),
        masked_attention(query, key, value, window_mask(tokens, f.window), scale),
    )
    return sum(gates[:, i, None] * branch for i, branch in enumerate(branches))


def paged_query(query: Tensor, views: PageViews, table: Tensor, row: Tensor, scale: float) -> tuple[Tensor, list[int]]:
    """(attention [Hq, D] of one query over the positions that `row` [S] shows, the pages it read, in order).

    Args:
        query: [Hq, D]. views: one layer's pages. table: int32 [n], the sequence's pages.
    """
    positions = row.nonzero()[:, 0]
    page = table[positions // views.block_size].long()
    offset = positions % views.block_size
    dtype, share = query.dtype, len(query) // views.k.shape[1]
    key, value = (
        decode_rows(views, name, (page, slice(None), offset)).to(dtype).repeat_interleave(share, dim=1)
        for name in ("k", "v")
    )
    weights = (torch.einsum("hd,shd->hs", query, key) * scale).softmax(-1)
    return torch.einsum("hs,shd->hd", weights, value), page.unique().tolist()


@dataclass(frozen=True)
class Traffic:
    """Bytes of one layer and sequence at a step.

    Attributes:
        read: of the entries that its query reads. read_pages: of the pages those lie in. resident: of the entries that
            it or a later query reads, up to the end of the mask.
    """

    read: int
    read_pages: int
    resident: int


def traffic(mask: Mask, position: int, entry_bytes: int, block_size: int) -> Traffic:
    """What the query at `position` reads, and what must be kept when it has been answered.

    Raises:
        ValueError: a position outside the mask.
    """
    if not 0 <= position < len(mask):
        raise ValueError(f"position {position}: the mask has {len(mask)} queries")
    row = mask[position]
    pages = torch.unique(row.nonzero()[:, 0] // block_size)
    kept = mask[position:, : position + 1].any(0)
    return Traffic(int(row.sum()) * entry_bytes, len(pages) * block_size * entry_bytes, int(kept.sum()) * entry_bytes)
