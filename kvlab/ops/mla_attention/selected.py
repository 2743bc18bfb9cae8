"""Attention over chosen latents: each query reads the rows it was told to read, and no others."""

from __future__ import annotations

import torch

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.coded import segment_rows
from kvlab.ops.mla_attention.absorbed import attend, enter, leave
from kvlab.ops.views import SegmentViews

QUERY_BLOCK = 64  # queries whose chosen rows are gathered at one time


def selected_attention(
    query: torch.Tensor,
    up: torch.Tensor,
    views: SegmentViews,
    batch: AttentionBatch,
    chosen: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """As `kvlab.ops.mla_attention.mla_attention`, each query over the positions in its row of `chosen` alone.

    Args:
        chosen: int64 [T, k], positions in the query's own sequence, none twice; -1 for none. A row of -1 gives zeros.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    table = batch.block_table[rows_to_sequences(batch)]  # [T, width]
    out = query.new_zeros(*query.shape[:2], up.shape[1] - (query.shape[2] - views.width("rope")))
    for first in range(0, len(query), QUERY_BLOCK):
        rows = slice(first, first + QUERY_BLOCK)
        latents, rope, live = pick(views, table[rows], chosen[rows], dtype)
        inner, turned = enter(query[rows].to(dtype), up, rope.shape[-1])
        seen = attend(inner, turned, latents, rope, live[:, None], scale)
        out[rows] = leave(seen, up, query.shape[2] - rope.shape[-1]).to(out.dtype)
    return out


def rows_to_sequences(batch: AttentionBatch) -> torch.Tensor:
    """int64 [T]: the sequence of each row; padded rows get the last one."""
    row = torch.arange(batch.num_tokens, device=batch.block_table.device)
    sequence = torch.searchsorted(batch.query_start_loc[1:].long(), row, right=True)
    return sequence.clamp_max(max(batch.num_seqs - 1, 0))


def pick(
    views: SegmentViews, table: torch.Tensor, chosen: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(latents [T, k, C], rotary keys [T, k, R], live bool [T, k]) of chosen positions [T, k]; 0 where not live."""
    live, position = chosen >= 0, chosen.clamp_min(0)
    page = table.gather(1, torch.div(position, views.block_size, rounding_mode="floor")).long()
    offset = position % views.block_size
    picked = (segment_rows(views, name, (page, 0, offset)) for name in ("latent", "rope"))
    latents, rope = (torch.where(live[..., None], rows, 0).to(dtype) for rows in picked)
    return latents, rope, live
