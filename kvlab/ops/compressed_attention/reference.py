"""compressed_attention, one token after the other."""

from __future__ import annotations

import torch

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.coded import segment_rows
from kvlab.ops.compressed_attention.rules import Entries, Window


def compressed_attention(
    query: torch.Tensor,
    batch: AttentionBatch,
    window: Window,
    entries: Entries | None,
    scale: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """See `kvlab.ops.compressed_attention.compressed_attention`."""
    out, starts = torch.zeros_like(query), batch.query_start_loc.tolist()
    dtype = torch.promote_types(query.dtype, torch.float32)
    for b, end in enumerate(batch.seq_lens.tolist()):
        for row in range(starts[b], starts[b + 1]):
            position = end - (starts[b + 1] - row)
            read = [(window, "kv", s) for s in range(max(0, position - window.size + 1), position + 1)]
            if entries is not None:
                read += [(entries, "entry", s) for s in entries.chosen[row].tolist() if s >= 0]
            rows = torch.stack([_row(source, name, b, s) for source, name, s in read]).to(dtype)
            scores = torch.cat((rows @ query[row].T.to(dtype) * scale, sinks.to(dtype)[None]))
            out[row] = (scores.softmax(0)[:-1].T @ rows).to(out.dtype)
    return out


def _row(source: Window | Entries, name: str, sequence: int, place: int) -> torch.Tensor:
    size = source.views.block_size
    page = int(source.batch.block_table[sequence, place // size])
    return segment_rows(source.views, name, (page, 0, place % size))
