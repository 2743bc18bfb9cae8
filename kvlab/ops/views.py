"""Typed views over a pool's bytes. Nothing is copied: writing to a view writes to the page."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from kvlab.quant import get_codec
from kvlab.specs.layout import PageLayout, Segment

# the types Numba reads pages with: it has no bf16, fp16 or fp8, so those are integers of the same width
_NUMPY = {"fp64": np.float64, "fp32": np.float32, "bf16": np.uint16, "fp16": np.uint16,
          "fp8_e4m3": np.uint8, "int8": np.int8}  # fmt: skip


@dataclass(frozen=True, eq=False)
class PageViews:
    """Keys and values of one layer's pages.

    Attributes:
        format: storage format name of the codes.
        k, v: codes, [num_pages, Hkv, block_size, D], strided over the page bytes.
        k_scale, v_scale: fp32 [num_pages, Hkv, block_size, 1], or None for formats without scales.
        buffer: the uint8 [num_pages, page_bytes] tensor they look at.
        layout: where each segment lies in a page.
        group: index of the block table that names these pages; None: as `kvlab.specs.layout.part_groups` has it.
    """

    format: str
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    buffer: torch.Tensor
    layout: PageLayout
    group: int | None = None

    @property
    def block_size(self) -> int:
        """Tokens per page."""
        return self.layout.block_size

    @cached_property
    def codes(self) -> np.ndarray:
        """The buffer as [num_pages, page_bytes / itemsize] of the code type, for CPU kernels."""
        return self.buffer.numpy().view(_NUMPY[self.format])

    @cached_property
    def scales(self) -> np.ndarray:
        """The buffer as fp32 [num_pages, page_bytes / 4], for CPU kernels; meaningless without scales."""
        return self.buffer.numpy().view(np.float32)

    @cached_property
    def geometry(self) -> np.ndarray:
        """What the CPU kernels need of the layout, int64 [8].

        block_size, row stride of k, offsets of k and v (in codes) and of their scales (in fp32), Hkv, row stride of v.
        """
        k, v, item = self.layout["k"], self.layout["v"], self.codes.itemsize
        scales = [self.layout[n].offset // 4 if self.k_scale is not None else 0 for n in ("k_scale", "v_scale")]
        offsets = (k.offset // item, v.offset // item, *scales)
        return np.array([self.block_size, k.row_bytes // item, *offsets, k.heads, v.row_bytes // item], np.int64)


def page_views(buffer: torch.Tensor, layout: PageLayout, group: int | None = None) -> PageViews:
    """Typed views of the pages in `buffer`, a contiguous uint8 [num_pages, page_bytes].

    `group` is the index of their block table where it is not `kvlab.specs.layout.part_groups`'.

    Raises:
        ValueError: buffer of another type, shape or page size; a page without k and v.
    """
    if buffer.dtype != torch.uint8 or buffer.dim() != 2 or not buffer.is_contiguous():
        raise ValueError(
            f"buffer {tuple(buffer.shape)} {buffer.dtype}: must be contiguous uint8 [num_pages, page_bytes]"
        )
    if buffer.shape[1] != layout.page_bytes:
        raise ValueError(f"buffer of {buffer.shape[1]} bytes a page: the layout has {layout.page_bytes}")
    names = {s.name for s in layout.segments}
    if not {"k", "v"} <= names:
        raise ValueError(f"layout with segments {sorted(names)}: must have k and v")
    fmt = layout["k"].format
    dtype = get_codec(fmt).dtype
    k, v = (_view(buffer, layout[n], dtype) for n in ("k", "v"))
    scaled = "k_scale" in names
    k_scale, v_scale = ((_view(buffer, layout[n], torch.float32) if scaled else None) for n in ("k_scale", "v_scale"))
    return PageViews(fmt, k, v, k_scale, v_scale, buffer, layout, group)


@dataclass(frozen=True, eq=False)
class SegmentViews:
    """The segments of a part that does not keep keys and values: a latent, compressed entries, a state.

    Attributes:
        segments: name -> codes [num_pages, heads, entries per page, width], strided over the page bytes; of a state
            the flat array [num_pages, elements].
        buffer: the uint8 [num_pages, page_bytes] tensor they look at.
        layout: where each segment lies in a page.
        group: as of `PageViews`.
    """

    segments: dict[str, torch.Tensor]
    buffer: torch.Tensor
    layout: PageLayout
    group: int | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.segments[name]

    @property
    def block_size(self) -> int:
        """Entries per page."""
        return self.layout.block_size


def part_views(buffer: torch.Tensor, layout: PageLayout, group: int | None = None) -> PageViews | SegmentViews:
    """Views of the pages of any part: `PageViews` where it keeps keys and values, else `SegmentViews`.

    Raises:
        ValueError: as `page_views`.
    """
    if {"k", "v"} <= {s.name for s in layout.segments}:
        return page_views(buffer, layout, group)
    views = {}
    for s in layout.segments:
        typed = _view(buffer, s, torch.float32 if s.format.startswith("scale") else get_codec(s.format).dtype)
        views[s.name] = typed if s.name in _TOKEN_SEGMENTS or s.name.endswith("_scale") else typed[:, 0, 0]
    return SegmentViews(views, buffer, layout, group)


# segments with a row per entry; the others are the arrays of a state
_TOKEN_SEGMENTS = ("latent", "rope", "kv", "entry", "index")


def _view(buffer: torch.Tensor, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
    item = dtype.itemsize
    typed = buffer.view(dtype)
    row = segment.row_bytes // item
    shape = (buffer.shape[0], segment.heads, segment.tokens, segment.width)
    strides = (typed.stride(0), segment.tokens * row, row, 1)
    return typed.as_strided(shape, strides, typed.storage_offset() + segment.offset // item)
