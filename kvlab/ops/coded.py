"""Rows into codes and back, through the views of a part: what every operation that has no kernel of its own uses."""

from __future__ import annotations

from typing import Any

import torch

from kvlab.ops.views import PageViews, SegmentViews
from kvlab.quant import get_codec


def encode_rows(views: PageViews, name: str, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(codes, metadata) of `rows` [T, Hkv, D], as the pages of `views` store `name` ("k" or "v")."""
    fixed = None if views.fixed is None else getattr(views.fixed, name)
    return get_codec(views.format).encode(rows if fixed is None else rows / fixed)


def decode_rows(views: PageViews, name: str, index: Any, heads: int = -2) -> torch.Tensor:
    """Rows of `name` ("k" or "v") at `index` into its pages, in fp32 (fp64 for fp64 codes).

    Args:
        heads: axis of the KV heads in what the index picks.
    """
    codes, meta = getattr(views, name), getattr(views, f"{name}_scale")
    width = views.key_dim if name == "k" else views.value_dim
    rows = get_codec(views.format).decode(pick(codes, index), None if meta is None else pick(meta, index), width)
    if views.fixed is None:
        return rows
    fixed = getattr(views.fixed, name)
    return rows * (fixed if heads == -2 else fixed[:, None])


def segment_rows(views: SegmentViews, name: str, index: Any) -> torch.Tensor:
    """Rows of segment `name` at `index` into its pages [num_pages, 1, entries, ...]: plain types as they are stored,
    others in fp32."""
    stored = views[name]
    segment = views.layout[name]
    codec = get_codec(segment.format)
    picked = pick(stored, index)
    if codec.meta is None and codec.dtype.itemsize > 1:
        return picked
    meta = views.segments.get(f"{name}_scale")
    return codec.decode(picked, None if meta is None else pick(meta, index), segment.width)


def pick(stored: torch.Tensor, index: Any) -> torch.Tensor:
    """`stored[index]`; fp8 has no indexed copy on every device, so its bytes are moved."""
    return stored.view(torch.uint8)[index].view(stored.dtype) if stored.dtype.itemsize == 1 else stored[index]


def put(stored: torch.Tensor, index: Any, new: torch.Tensor, live: torch.Tensor) -> None:
    """stored[index] = new where `live` [T]; other places keep what they hold. In place."""
    if stored.dtype.itemsize == 1:
        stored, new = stored.view(torch.uint8), new.view(torch.uint8)
    live = live.view(-1, *(1,) * (new.dim() - 1))
    stored[index] = torch.where(live, new.to(stored.dtype), stored[index])
