"""paged_attention, one sequence after the other, scores written out in full."""

from __future__ import annotations

import torch

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.views import PageViews
from kvlab.quant import get_codec


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
    starts = batch.query_start_loc.tolist()
    out.zero_()
    for b, end in enumerate(batch.seq_lens.tolist()):
        rows = slice(starts[b], starts[b + 1])
        first = end - (rows.stop - rows.start)  # position of the sequence's first query
        if end == 0 or first == end:
            continue
        low = max(0, first - window + 1) if window else 0
        key, value = gather(views, batch.block_table[b], low, end, query)
        q_pos = torch.arange(first, end, device=query.device)[:, None]
        k_pos = torch.arange(low, end, device=query.device)[None, :]
        hidden = k_pos > q_pos
        if window:
            hidden |= k_pos <= q_pos - window
        out[rows] = dense_attention(query[rows], key, value, hidden, scale, softcap).to(out.dtype)


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """Attention [T, Hq, D] of query [T, Hq, D] over key, value [Hkv, S, D]; `hidden` [T, S] is not seen."""
    rows, num_heads, head_dim = query.shape
    q = query.to(key.dtype).transpose(0, 1).reshape(key.shape[0], -1, head_dim)  # [Hkv, Hq / Hkv * T, D]
    scores = (q @ key.transpose(1, 2)).view(num_heads, rows, -1) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    result = weights.view(key.shape[0], -1, key.shape[1]) @ value
    return result.view(num_heads, rows, head_dim).transpose(0, 1)


def gather(
    views: PageViews, table: torch.Tensor, low: int, end: int, query: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decoded (key, value) [Hkv, end - low, D] of positions low .. end - 1, in fp32, or fp64 for an fp64 query."""
    decode = get_codec(views.format).decode
    positions = torch.arange(low, end, device=query.device)
    page = table[positions // views.block_size].long()
    offset = positions % views.block_size
    dtype = torch.promote_types(query.dtype, torch.float32)

    def rows(codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        picked = codes[page, :, offset]  # [S, Hkv, D]
        picked_scales = None if scales is None else scales[page, :, offset]
        return decode(picked, picked_scales).to(dtype).transpose(0, 1)

    return rows(views.k, views.k_scale), rows(views.v, views.v_scale)
