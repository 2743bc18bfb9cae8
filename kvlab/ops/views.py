"""Typed views over a pool's bytes. Nothing is copied: writing to a view writes to the page."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from kvlab.quant import get_codec, storage_types
from kvlab.quant.fixed import FixedScales
from kvlab.specs.layout import PageLayout, Segment

# the types Numba reads pages with: it has no bf16, fp16 or fp8, so those are integers of the same width
# fp8_e4m3 is uint8; packed 4-bit codes are uint32, so that a kernel knows the one from the other
_NUMPY = {"fp64": np.float64, "fp32": np.float32, "bf16": np.uint16, "fp16": np.uint16, "fp8_e4m3": np.uint8,
          "fp8_e4m3_row": np.uint8, "int8": np.int8, "int4": np.uint32, "int4_sym": np.uint32}  # fmt: skip
_PACKED = ("int4", "int4_sym")


@dataclass(frozen=True, eq=False)
class PageViews:
    """Keys and values of one layer's pages.

    Attributes:
        format: storage format name of the codes.
        k, v: codes, [num_pages, Hkv, block_size, D], strided over the page bytes; packed ones have bytes for D.
        k_scale, v_scale: metadata [num_pages, Hkv, block_size, n] in the codec's type, or None.
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
    fixed: FixedScales | None = None

    @property
    def block_size(self) -> int:
        """Tokens per page."""
        return self.layout.block_size

    @property
    def key_dim(self) -> int:
        """Values of a key, D."""
        return self.layout["k"].width

    @property
    def value_dim(self) -> int:
        """Values of a value, Dv."""
        return self.layout["v"].width

    @property
    def in_place(self) -> bool:
        """Whether the CPU kernels read these codes as they lie; other formats are gathered and decoded by torch."""
        whole = self.format not in _PACKED or not (self.key_dim % 8 or self.value_dim % 8)
        return self.format in _NUMPY and whole and self.fixed is None

    @cached_property
    def codes(self) -> np.ndarray:
        """The buffer as [num_pages, page_bytes / itemsize] of the code type, for CPU kernels."""
        return self.buffer.numpy().view(_NUMPY[self.format])

    @cached_property
    def scales(self) -> np.ndarray:
        """The buffer as fp32 [num_pages, page_bytes / 4], for CPU kernels; meaningless without fp32 scales."""
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


def page_views(
    buffer: torch.Tensor, layout: PageLayout, group: int | None = None, fixed: FixedScales | None = None
) -> PageViews:
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
    codec = get_codec(fmt)
    k, v = (_view(buffer, layout[n], codec.dtype) for n in ("k", "v"))
    k_scale, v_scale = ((_view(buffer, layout[n], codec.meta) if codec.meta else None) for n in ("k_scale", "v_scale"))
    return PageViews(fmt, k, v, k_scale, v_scale, buffer, layout, group, fixed)


@dataclass(frozen=True, eq=False)
class SegmentViews:
    """The segments of a part that does not keep keys and values: a latent, compressed entries, a state.

    Attributes:
        segments: name -> codes [num_pages, heads, entries per page, width], strided over the page bytes, and
            `NAME_scale` -> their metadata; of a state the flat array [num_pages, elements].
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

    def width(self, name: str) -> int:
        """Values of a row of segment `name`; packed codes are fewer elements than that."""
        return self.layout[name].width

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
        typed = _view(buffer, s, segment_type(layout, s))
        views[s.name] = typed if s.name in _TOKEN_SEGMENTS or s.name.endswith("_scale") else typed[:, 0, 0]
    return SegmentViews(views, buffer, layout, group)


def segment_type(layout: PageLayout, segment: Segment) -> torch.dtype:
    """The torch type of a segment of `layout`; metadata has the type that the codec of its codes gives it."""
    if not segment.format.startswith("scale"):
        return storage_types(segment.format)[0]
    found = storage_types(layout[segment.name.removesuffix("_scale")].format)[1]
    assert found is not None, "a layout has scales where the codec has"
    return found


# segments with a row per entry; the others are the arrays of a state
_TOKEN_SEGMENTS = ("latent", "rope", "kv", "entry", "index", "k_closed", "v_closed", "k_outliers", "v_outliers")


def _view(buffer: torch.Tensor, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
    item = dtype.itemsize
    typed = buffer.view(dtype)
    row = segment.row_bytes // item
    # fewer than `width` elements where several codes share a byte
    shape = (buffer.shape[0], segment.heads, segment.tokens, segment.used_bytes // item)
    strides = (typed.stride(0), segment.tokens * row, row, 1)
    return typed.as_strided(shape, strides, typed.storage_offset() + segment.offset // item)
