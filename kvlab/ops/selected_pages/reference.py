"""selected_pages, one sequence and KV head after the other."""

from __future__ import annotations

import torch

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.coded import decode_rows
from kvlab.ops.views import PageViews


def selected_pages(
    query: torch.Tensor, views: PageViews, batch: AttentionBatch, chosen: torch.Tensor, scale: float
) -> torch.Tensor:
    """See `kvlab.ops.selected_pages.selected_pages`."""
    out = query.new_zeros((*query.shape[:2], views.value_dim))
    kv_heads, size = views.k.shape[1], views.block_size
    share = query.shape[1] // kv_heads
    dtype = torch.promote_types(query.dtype, torch.float32)
    for b, end in enumerate(batch.seq_lens[: len(query)].tolist()):
        for h in range(kv_heads):
            tokens = [p * size + i for p in chosen[b, h].tolist() if p >= 0 for i in range(size) if p * size + i < end]
            if not tokens:
                continue
            at = torch.tensor(tokens, device=query.device)
            page = batch.block_table[b][torch.div(at, size, rounding_mode="floor")].long()
            key, value = (decode_rows(views, n, (page, slice(None), at % size))[:, h].to(dtype) for n in ("k", "v"))
            rows = slice(h * share, (h + 1) * share)
            weights = (query[b, rows].to(dtype) @ key.T * scale).softmax(-1)
            out[b, rows] = (weights @ value).to(out.dtype)
    return out
