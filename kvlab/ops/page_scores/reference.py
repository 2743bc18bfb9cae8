"""page_scores, written out, and the bounds it goes by."""

from __future__ import annotations

import torch

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.coded import decode_rows
from kvlab.ops.views import PageViews


def page_bounds(views: PageViews, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(low, high), fp32 [num_pages, Hkv, D], over the first `counts[page]` keys of each page; 0 for an empty page."""
    keys = decode_rows(views, "k", slice(None), heads=-3).float()  # [pages, Hkv, P, D]
    live = (torch.arange(views.block_size, device=keys.device) < counts[:, None])[:, None, :, None]
    low, high = (torch.where(live, keys, fill) for fill in (float("inf"), float("-inf")))
    empty = (counts == 0)[:, None, None]
    return low.amin(2).masked_fill(empty, 0), high.amax(2).masked_fill(empty, 0)


def page_scores(
    query: torch.Tensor, bounds: tuple[torch.Tensor, torch.Tensor], batch: AttentionBatch, block_size: int
) -> torch.Tensor:
    """See `kvlab.ops.page_scores.page_scores`."""
    table = batch.block_table[: len(query)].long()
    low, high = (b[table].float().transpose(1, 2)[:, :, None] for b in bounds)  # [B, Hkv, 1, width, D]
    q = query.float().unflatten(1, (low.shape[1], -1))[:, :, :, None]  # [B, Hkv, Hq / Hkv, 1, D]
    scores = torch.maximum(q * low, q * high).sum(-1).amax(2)
    pages = -(-batch.seq_lens[: len(query)].long() // block_size)
    live = (torch.arange(table.shape[1], device=table.device) < pages[:, None]) & (table != 0)
    return scores.masked_fill(~live[:, None], float("-inf"))
