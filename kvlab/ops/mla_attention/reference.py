"""mla_attention by its definition: every head's keys and values written out, one query after the other."""

from __future__ import annotations

import torch

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.mla_attention.gather import span
from kvlab.ops.views import SegmentViews


def mla_attention(
    query: torch.Tensor, up: torch.Tensor, views: SegmentViews, batch: AttentionBatch, scale: float, out: torch.Tensor
) -> None:
    """See `kvlab.ops.mla_attention.mla_attention`; writes to `out`."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    starts = batch.query_start_loc.tolist()
    for b, end in enumerate(batch.seq_lens.tolist()):
        if end == 0 or starts[b] == starts[b + 1]:
            continue
        latents, rope = span(views, batch.block_table[b], (0, end), dtype)
        keys, values = heads(latents, rope, up.to(dtype), query.shape[2] - rope.shape[1])
        first = end - (starts[b + 1] - starts[b])
        for row in range(starts[b], starts[b + 1]):
            seen = first + row - starts[b] + 1
            scores = torch.einsum("hd,shd->hs", query[row].to(dtype), keys[:seen]) * scale
            out[row] = torch.einsum("hs,shd->hd", scores.softmax(-1), values[:seen]).to(out.dtype)


def heads(
    latents: torch.Tensor, rope: torch.Tensor, up: torch.Tensor, unrotated: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [S, H, N + R] and values [S, H, V] of every head, from latents [S, C] and rotary keys [S, R].

    Args:
        up: [H, N + V, C]. unrotated: N.
    """
    expanded = torch.einsum("sc,hdc->shd", latents, up)
    shared = rope[:, None].expand(-1, len(up), -1)
    return torch.cat((expanded[..., :unrotated], shared), dim=-1), expanded[..., unrotated:]
