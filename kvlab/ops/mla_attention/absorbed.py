"""mla_attention in the latent space: queries go into it, attention runs over latents, its result comes out of it.

All heads read the same row per token: multi-query attention with keys of C + R values and values of C.
"""

from __future__ import annotations

import torch

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.mla_attention.gather import gather, span
from kvlab.ops.views import SegmentViews

QUERY_BLOCK = 64  # queries of a chunk whose scores exist at one time


def decodes(
    query: torch.Tensor, up: torch.Tensor, views: SegmentViews, batch: AttentionBatch, scale: float, out: torch.Tensor
) -> None:
    """The first `batch.num_decodes` rows, one query per sequence, all at once; reads nothing back to the host."""
    count, size = batch.num_decodes, views.block_size
    pages = -(-batch.max_seq_len // size)
    live = torch.arange(pages * size, device=query.device) < batch.seq_lens[:count, None]
    dtype = torch.promote_types(query.dtype, torch.float32)
    latents, rope = gather(views, batch.block_table[:count, :pages], live, dtype)
    inner, turned = enter(query[:count].to(dtype), up, rope.shape[-1])
    seen = attend(inner, turned, latents, rope, live[:, None], scale)
    out[:count] = leave(seen, up, query.shape[2] - rope.shape[-1]).to(out.dtype)


def chunk(
    query: torch.Tensor, up: torch.Tensor, views: SegmentViews, where: tuple[torch.Tensor, int], scale: float
) -> torch.Tensor:
    """Attention [n, H, V] of one sequence's n last tokens.

    Args:
        where: (the sequence's block table, its length).
    """
    table, end = where
    dtype = torch.promote_types(query.dtype, torch.float32)
    latents, rope = span(views, table, (0, end), dtype)
    results = []
    for first in range(0, len(query), QUERY_BLOCK):
        part = query[first : first + QUERY_BLOCK].to(dtype)
        position = end - len(query) + first + torch.arange(len(part), device=query.device)
        live = torch.arange(end, device=query.device) <= position[:, None]
        inner, turned = enter(part, up, rope.shape[-1])
        seen = attend(inner, turned, latents[None], rope[None], live[:, None], scale)
        results.append(leave(seen, up, query.shape[2] - rope.shape[-1]))
    return torch.cat(results)


def enter(query: torch.Tensor, up: torch.Tensor, rotated: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries in the latent space [T, H, C] and their rotated values [T, H, R], of `query` [T, H, N + R]."""
    plain, turned = query[..., :-rotated], query[..., -rotated:]
    inner = torch.bmm(plain.transpose(0, 1), up[:, : plain.shape[-1]].to(query.dtype))
    return inner.transpose(0, 1), turned


def leave(seen: torch.Tensor, up: torch.Tensor, unrotated: int) -> torch.Tensor:
    """Values [T, H, V] of weighted latents `seen` [T, H, C]."""
    return torch.bmm(seen.transpose(0, 1), up[:, unrotated:].to(seen.dtype).transpose(1, 2)).transpose(0, 1)


def attend(
    inner: torch.Tensor,
    turned: torch.Tensor,
    latents: torch.Tensor,
    rope: torch.Tensor,
    live: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Weighted latents [T, H, C]; a query that sees nothing gets zeros.

    Args:
        inner, turned: of `enter`.
        latents, rope: [T, S, C] and [T, S, R], or with 1 for T where all queries share them; 0 where not live.
        live: bool [T, 1, S].
    """
    scores = (inner @ latents.transpose(1, 2) + turned @ rope.transpose(1, 2)) * scale
    scores = scores.masked_fill(~live, torch.finfo(scores.dtype).min)
    return scores.softmax(-1).masked_fill(~live, 0) @ latents
