"""mla_attention with heads expanded: for a long chunk fewer operations than in the latent space.

Keys and values exist for one stretch of the context at a time; what the queries see of each stretch is merged by the
sum of its exponentials.
"""

from __future__ import annotations

import torch

from kvlab.ops.mla_attention.gather import span
from kvlab.ops.mla_attention.merge import merge
from kvlab.ops.mla_attention.reference import heads
from kvlab.ops.views import SegmentViews

KEY_BLOCK = 1024  # tokens of context whose heads exist at one time


def chunk(
    query: torch.Tensor, up: torch.Tensor, views: SegmentViews, where: tuple[torch.Tensor, int], scale: float
) -> torch.Tensor:
    """Attention [n, H, V] of one sequence's n last tokens.

    Args:
        where: (the sequence's block table, its length).
    """
    table, end = where
    dtype = torch.promote_types(query.dtype, torch.float32)
    q = query.to(dtype).transpose(0, 1)  # [H, n, D]
    position = torch.arange(end - len(query), end, device=query.device)
    states = []
    for first in range(0, end, KEY_BLOCK):
        bounds = (first, min(first + KEY_BLOCK, end))
        latents, rope = span(views, table, bounds, dtype)
        keys, values = heads(latents, rope, up.to(dtype), query.shape[2] - rope.shape[1])
        seen = torch.arange(*bounds, device=query.device) <= position[:, None]
        states.append(_attend(q, keys.transpose(0, 1), values.transpose(0, 1), seen, scale))
    return merge(*map(torch.stack, zip(*states, strict=True)))[0].transpose(0, 1)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(attention [H, n, V], natural logarithm of its denominator [H, n]) over one stretch of keys [H, S, D]."""
    scores = (q @ keys.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
    total = scores.logsumexp(-1)
    # a query before the whole stretch sees none of it: its weights are 0, not 0 / 0
    weights = (scores - total.masked_fill(total == float("-inf"), 0)[..., None]).exp()
    return weights @ values, total
