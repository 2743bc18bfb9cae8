"""index_topk, one token and one entry after the other."""

from __future__ import annotations

import torch

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.coded import segment_rows
from kvlab.ops.views import SegmentViews


def index_topk(
    query: torch.Tensor,
    weights: torch.Tensor,
    views: SegmentViews,
    batch: AttentionBatch,
    ratio: int,
    chosen: torch.Tensor,
) -> None:
    """See `kvlab.ops.index_topk.index_topk`; writes to `chosen`."""
    starts, size = batch.query_start_loc.tolist(), views.block_size
    for b, end in enumerate(batch.seq_lens.tolist()):
        table = batch.block_table[b].tolist()
        for row in range(starts[b], starts[b + 1]):
            position = end - (starts[b + 1] - row)
            scores = []
            for entry in range((position + 1) // ratio):
                key = segment_rows(views, "index", (table[entry // size], 0, entry % size)).to(query.dtype)
                scores.append(float((weights[row] * torch.relu(query[row] @ key)).sum()))
            best = sorted(range(len(scores)), key=lambda s: -scores[s])[: chosen.shape[1]]
            chosen[row, : len(best)] = torch.tensor(best, dtype=torch.int64)
