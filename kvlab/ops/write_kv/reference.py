"""write_kv, one token after the other."""

from __future__ import annotations

import torch

from kvlab.ops.coded import encode_rows
from kvlab.ops.views import PageViews


def write_kv(key: torch.Tensor, value: torch.Tensor, views: PageViews, slot_mapping: torch.Tensor) -> None:
    """See `kvlab.ops.write_kv.write_kv`."""
    for name, rows, codes, scales in (("k", key, views.k, views.k_scale), ("v", value, views.v, views.v_scale)):
        new_codes, new_scales = encode_rows(views, name, rows)
        for t, slot in enumerate(slot_mapping.tolist()):
            if slot < 0:
                continue
            page, offset = divmod(slot, views.block_size)
            codes[page, :, offset] = new_codes[t]
            if scales is not None and new_scales is not None:
                scales[page, :, offset] = new_scales[t]
