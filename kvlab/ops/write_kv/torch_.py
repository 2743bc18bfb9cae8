"""write_kv as one scatter, without host reads."""

from __future__ import annotations

import torch

from kvlab.ops.coded import encode_rows, put
from kvlab.ops.views import PageViews


def write_kv(key: torch.Tensor, value: torch.Tensor, views: PageViews, slot_mapping: torch.Tensor) -> None:
    """See `kvlab.ops.write_kv.write_kv`. A padded row rewrites what stands at slot 0 of the null page."""
    live = slot_mapping >= 0
    slot = slot_mapping.clamp_min(0)
    index = (torch.div(slot, views.block_size, rounding_mode="floor"), slice(None), slot % views.block_size)
    for name, rows, codes, scales in (("k", key, views.k, views.k_scale), ("v", value, views.v, views.v_scale)):
        new_codes, new_scales = encode_rows(views, name, rows)
        put(codes, index, new_codes, live)
        if scales is not None and new_scales is not None:
            put(scales, index, new_scales, live)
