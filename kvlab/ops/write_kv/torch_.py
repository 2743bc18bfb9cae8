"""write_kv as one scatter, without host reads."""

from __future__ import annotations

import torch

from kvlab.ops.views import PageViews
from kvlab.quant import get_codec


def write_kv(key: torch.Tensor, value: torch.Tensor, views: PageViews, slot_mapping: torch.Tensor) -> None:
    """See `kvlab.ops.write_kv.write_kv`. A padded row rewrites what stands at slot 0 of the null page."""
    encode = get_codec(views.format).encode
    live = slot_mapping >= 0
    slot = slot_mapping.clamp_min(0)
    page = torch.div(slot, views.block_size, rounding_mode="floor")
    offset = slot % views.block_size
    for rows, codes, scales in ((key, views.k, views.k_scale), (value, views.v, views.v_scale)):
        new_codes, new_scales = encode(rows)
        _scatter(codes, new_codes, live, page, offset)
        if scales is not None and new_scales is not None:
            _scatter(scales, new_scales, live, page, offset)


def _scatter(
    stored: torch.Tensor, new: torch.Tensor, live: torch.Tensor, page: torch.Tensor, offset: torch.Tensor
) -> None:
    if stored.dtype == torch.float8_e4m3fn:  # has no indexed copy on every device: move its bytes
        stored, new = stored.view(torch.uint8), new.view(torch.uint8)
    stored[page, :, offset] = torch.where(live[:, None, None], new, stored[page, :, offset])
