"""index_topk for decodes all at once, without host reads, and for each prefill chunk in blocks of queries."""

from __future__ import annotations

import torch

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.coded import segment_rows
from kvlab.ops.views import SegmentViews

QUERY_BLOCK = 64  # queries of a chunk whose scores per head exist at one time


def index_topk(
    query: torch.Tensor,
    weights: torch.Tensor,
    views: SegmentViews,
    batch: AttentionBatch,
    ratio: int,
    chosen: torch.Tensor,
) -> None:
    """See `kvlab.ops.index_topk.index_topk`; writes to `chosen`. Loops over host integers of the batch only."""
    count = batch.num_decodes
    if count:
        keys, entries = _keys(views, batch.block_table[:count], batch.max_seq_len // ratio)
        ready = torch.div(batch.seq_lens[:count].long(), ratio, rounding_mode="floor")
        keys = torch.where((entries < ready[:, None])[..., None], keys, 0).to(query.dtype)
        _choose(query[:count], weights[:count], keys, ready, chosen[:count])
    row = count
    for i in range(count, len(batch.query_lens)):
        length, end = batch.query_lens[i], batch.ends[i]
        keys, _ = _keys(views, batch.block_table[i : i + 1], end // ratio)
        for first in range(0, length, QUERY_BLOCK):
            rows = slice(row + first, row + min(first + QUERY_BLOCK, length))
            position = end - length + first + torch.arange(rows.stop - rows.start, device=query.device)
            ready = torch.div(position + 1, ratio, rounding_mode="floor")
            _choose(query[rows], weights[rows], keys.to(query.dtype), ready, chosen[rows])
        row += length


def _keys(views: SegmentViews, table: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(index keys [b, count, D] of the sequences with `table` [b, width], 0 .. count - 1)."""
    entries = torch.arange(count, device=table.device)
    page = table[:, torch.div(entries, views.block_size, rounding_mode="floor")].long()
    return segment_rows(views, "index", (page, 0, entries % views.block_size)), entries


def _choose(
    query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, ready: torch.Tensor, chosen: torch.Tensor
) -> None:
    """Writes the best of the first `ready` [n] entries to `chosen` [n, k]; keys [n or 1, S, D], live ones only or 0."""
    if not keys.shape[1]:
        return
    scores = torch.relu(query @ keys.transpose(1, 2))  # [n, Hi, S]
    total = (weights[:, None] @ scores)[:, 0]
    hidden = torch.arange(keys.shape[1], device=keys.device) >= ready[:, None]
    k = min(chosen.shape[1], keys.shape[1])
    best = total.masked_fill(hidden, float("-inf")).topk(k, dim=-1).indices
    chosen[:, :k] = torch.where(best < ready[:, None], best, -1)
