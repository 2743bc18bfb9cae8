"""Latents and rotary keys of sequences, from pages."""

from __future__ import annotations

import torch

from kvlab.ops.coded import segment_rows
from kvlab.ops.views import SegmentViews


def gather(
    views: SegmentViews, table: torch.Tensor, live: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(latents [b, S, C], rotary keys [b, S, R]) of the pages in `table` [b, n], S = n * block_size, in `dtype`.

    Entries that are not `live` [b, S] are 0, whatever their page holds.
    """
    found = []
    for name in ("latent", "rope"):
        rows = segment_rows(views, name, table.long()).squeeze(2).flatten(1, 2)
        found.append(torch.where(live[..., None], rows, 0).to(dtype))
    return found[0], found[1]


def span(
    views: SegmentViews, table: torch.Tensor, bounds: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(latents [S, C], rotary keys [S, R]) of positions bounds[0] .. bounds[1] - 1 of the sequence with `table` [n]."""
    positions = torch.arange(*bounds, device=table.device)
    size = views.block_size
    page, offset = table[torch.div(positions, size, rounding_mode="floor")].long(), positions % size
    latents, rope = (segment_rows(views, name, (page, 0, offset)).to(dtype) for name in ("latent", "rope"))
    return latents, rope
