"""paged_attention on the CPU: decodes by a Numba kernel on the pages in place, chunks by torch on gathered pages."""

from __future__ import annotations

import torch

from kvlab.ops.attention.cpu_decode import decode_attention
from kvlab.ops.attention.cpu_gather import gather_rows
from kvlab.ops.attention.reference import dense_attention
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.numba_support import launch
from kvlab.ops.views import PageViews

QUERY_BLOCK = 256  # query tokens whose scores exist at one time: bounds memory to Hq * 256 * S floats


def paged_attention(
    query: torch.Tensor,
    views: PageViews,
    batch: AttentionBatch,
    scale: float,
    window: int,
    softcap: float,
    out: torch.Tensor,
) -> None:
    """See `kvlab.ops.attention.paged_attention`; writes to `out`."""
    starts, seq_lens, table = batch.arrays
    decodes = batch.num_decodes
    if decodes < batch.num_seqs or batch.num_tokens > decodes or query.dtype != torch.float32:
        out.zero_()
    if decodes:
        result = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32)
        options = (float(scale), int(window), float(softcap), views.format == "bf16", views.k_scale is not None)
        launch(
            decode_attention, query.float().contiguous().numpy(), views.codes, views.scales, views.geometry,
            (starts, seq_lens, table), decodes, options, result.numpy(),
        )  # fmt: skip
        if result is not out:
            rows = starts[decodes]
            out[:rows] = result[:rows]
    for b in range(decodes, batch.num_seqs):
        first, stop, end = int(starts[b]), int(starts[b + 1]), int(seq_lens[b])
        if stop > first and end > 0:
            chunk = _chunk(query[first:stop], views, table[b], end, (scale, window, softcap))
            out[first:stop] = chunk.to(out.dtype)


def _chunk(query: torch.Tensor, views: PageViews, pages, end: int, options) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Attention [T, Hq, D] of the last T tokens of a sequence of `end` tokens."""
    scale, window, softcap = options
    rows = query.shape[0]
    first = end - rows
    low = max(0, first - window + 1) if window else 0
    key, value = gather_rows(views, pages, low, end)
    result = torch.empty(query.shape, dtype=torch.float32)
    for i in range(0, rows, QUERY_BLOCK):
        j = min(i + QUERY_BLOCK, rows)
        begin = max(low, first + i - window + 1) if window else 0
        q_pos = torch.arange(first + i, first + j)[:, None]
        k_pos = torch.arange(begin, first + j)[None, :]
        hidden = k_pos > q_pos
        if window:
            hidden |= k_pos <= q_pos - window
        seen = slice(begin - low, first + j - low)
        result[i:j] = dense_attention(query[i:j], key[:, seen], value[:, seen], hidden, scale, softcap)
    return result
