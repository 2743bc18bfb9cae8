"""selected_pages as padded dense tensors, without host reads: what a device runs where no kernel reads the format."""

from __future__ import annotations

import torch

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.coded import decode_rows
from kvlab.ops.views import PageViews


def selected_pages(
    query: torch.Tensor, views: PageViews, batch: AttentionBatch, chosen: torch.Tensor, scale: float
) -> torch.Tensor:
    """See `kvlab.ops.selected_pages.selected_pages`; the chosen pages are gathered and decoded in memory first."""
    (rows, num_heads, head_dim), kv_heads = query.shape, chosen.shape[1]
    size, dtype = views.block_size, torch.promote_types(query.dtype, torch.float32)
    slot = torch.arange(size, device=query.device)
    token = (chosen.long()[..., None] * size + slot).flatten(2)  # [B, Hkv, S]
    live = (token >= 0) & (token < batch.seq_lens[:rows, None, None])
    table = batch.block_table[:rows].long()
    place = torch.where(live, torch.div(token, size, rounding_mode="floor"), 0)
    page = table.gather(1, place.flatten(1)).view_as(place)
    index = page, torch.arange(kv_heads, device=query.device)[:, None], token % size
    # what no query may read is 0: it may hold anything
    key, value = (
        torch.where(live[..., None], decode_rows(views, name, index, heads=-3).to(dtype), 0) for name in ("k", "v")
    )
    grouped = query.to(dtype).reshape(rows, kv_heads, -1, head_dim)
    score = (grouped @ key.transpose(2, 3) * scale).masked_fill(~live[:, :, None], float("-inf"))
    chose = live.any(-1)[:, :, None, None]  # a head that chose nothing gives zeros
    weights = torch.where(chose, score.softmax(-1), 0)
    return (weights @ value).reshape(rows, num_heads, -1).to(query.dtype)
