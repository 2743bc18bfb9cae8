"""Store new keys and values in their pages."""

from __future__ import annotations

import torch

from kvlab.ops.dispatch import backend
from kvlab.ops.grouped_views import GroupedViews
from kvlab.ops.views import PageViews
from kvlab.ops.write_kv import reference, torch_


def write_kv(key: torch.Tensor, value: torch.Tensor, views: PageViews, slot_mapping: torch.Tensor) -> None:
    """Encodes `key` and `value` and writes row t to slot `slot_mapping[t]`; changes `views` in place.

    Args:
        key, value: [T, Hkv, D] and [T, Hkv, Dv], any float type.
        views: the layer's pages.
        slot_mapping: int64 [T], page * block_size + offset; a row with -1 writes nothing. Slots differ.
    """
    if isinstance(views, GroupedViews):
        views = views.recent  # groups close when attention first reads them so
    name = backend(key, triton=True)
    if name == "cpu" and not views.in_place:
        name = "torch"
    if name == "triton":
        from kvlab.ops.write_kv import triton_

        kernels = triton_ if triton_.supports(key, views) else torch_
        kernels.write_kv(key, value, views, slot_mapping)
    elif name == "reference":
        reference.write_kv(key, value, views, slot_mapping)
    elif name == "torch":
        torch_.write_kv(key, value, views, slot_mapping)
    else:
        from kvlab.ops.write_kv import cpu

        cpu.write_kv(key, value, views, slot_mapping)
