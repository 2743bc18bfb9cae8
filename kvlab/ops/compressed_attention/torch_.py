"""compressed_attention as gathered rows per token, in blocks of tokens, without host reads."""

from __future__ import annotations

import torch

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.coded import segment_rows
from kvlab.ops.compressed_attention.rules import Entries, Window
from kvlab.ops.mla_attention.selected import rows_to_sequences
from kvlab.ops.views import SegmentViews

QUERY_BLOCK = 64  # tokens whose rows are gathered at one time


def compressed_attention(
    query: torch.Tensor,
    batch: AttentionBatch,
    window: Window,
    entries: Entries | None,
    scale: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """See `kvlab.ops.compressed_attention.compressed_attention`."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    sequence, out = rows_to_sequences(batch), torch.zeros_like(query)
    # rows behind the last sequence are padding
    real = torch.arange(len(query), device=query.device) < batch.query_start_loc[-1]
    back = torch.arange(min(window.size, batch.max_seq_len), device=query.device)
    places = torch.where(real[:, None], batch.positions[:, None] - back, -1)
    for first in range(0, len(query), QUERY_BLOCK):
        rows = slice(first, first + QUERY_BLOCK)
        table = window.batch.block_table[sequence[rows]]
        read, live = _pick(window.views, "kv", table, places[rows], dtype)
        if entries is not None:
            chosen = torch.where(real[rows, None], entries.chosen[rows], -1)
            more = _pick(entries.views, "entry", entries.batch.block_table[sequence[rows]], chosen, dtype)
            read, live = torch.cat((read, more[0]), dim=1), torch.cat((live, more[1]), dim=1)
        scores = query[rows].to(dtype) @ read.transpose(1, 2) * scale
        scores = scores.masked_fill(~live[:, None], float("-inf"))
        sink = sinks.to(dtype)[None, :, None].expand(len(scores), -1, 1)
        out[rows] = (torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1] @ read).to(out.dtype)
    return out


def _pick(
    views: SegmentViews, name: str, table: torch.Tensor, places: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows [n, k, D], live bool [n, k]) at `places` [n, k] of sequences with `table` [n, width]; 0 where negative."""
    live, place = places >= 0, places.clamp_min(0)
    page = table.gather(1, torch.div(place, views.block_size, rounding_mode="floor")).long()
    rows = segment_rows(views, name, (page, 0, place % views.block_size))
    return torch.where(live[..., None], rows, 0).to(dtype), live
