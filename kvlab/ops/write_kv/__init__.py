"""Store new keys and values in their pages."""

from __future__ import annotations

import torch

from kvlab.ops.dispatch import backend
from kvlab.ops.grouped_views import GroupedViews
from kvlab.ops.rope import Angles, rope
from kvlab.ops.views import PageViews
from kvlab.ops.write_kv import reference, torch_


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    views: PageViews | GroupedViews,
    slot_mapping: torch.Tensor,
    angles: Angles | None = None,
) -> None:
    """Encodes `key` and `value` and writes row t to slot `slot_mapping[t]`; changes `views` in place.

    Args:
        key, value: [T, Hkv, D] and [T, Hkv, Dv], any float type.
        views: the layer's pages.
        slot_mapping: int64 [T], page * block_size + offset; a row with -1 writes nothing. Slots differ.
        angles: by what the keys are turned first; None: they are turned, or not to be. See `turns_keys`.
    """
    rows, name = _row_views(views), backend(key, triton=True)
    fused = name == "triton" and _has_kernel(key, rows)
    if angles is not None and not fused:
        key = rope(key, angles.cos, angles.sin, angles.positions, angles.interleaved)
    if name == "cpu" and not rows.in_place:
        name = "torch"
    if fused:
        from kvlab.ops.write_kv import triton_

        triton_.write_kv(key, value, rows, slot_mapping, angles)
    elif name == "reference":
        reference.write_kv(key, value, rows, slot_mapping)
    elif name == "cpu":
        from kvlab.ops.write_kv import cpu

        cpu.write_kv(key, value, rows, slot_mapping)
    else:
        torch_.write_kv(key, value, rows, slot_mapping)


def turns_keys(rows: torch.Tensor, views: PageViews | GroupedViews) -> bool:
    """Whether keys of the type and place of `rows` are turned in the pass that writes them: one read and one write of a
    step's keys less, and one rounding where turned keys would be stored twice."""
    return backend(rows, triton=True) == "triton" and _has_kernel(rows, _row_views(views))


def _has_kernel(rows: torch.Tensor, views: PageViews) -> bool:
    from kvlab.ops.write_kv import triton_

    return triton_.supports(rows, views)


def _row_views(views: PageViews | GroupedViews) -> PageViews:
    """Where new rows go; groups close when attention first reads them so."""
    return views.recent if isinstance(views, GroupedViews) else views
