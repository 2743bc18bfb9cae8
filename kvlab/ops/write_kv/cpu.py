"""write_kv on the CPU: rows are encoded by torch, then copied to their slots by Numba."""

from __future__ import annotations

import numpy as np
import torch

from kvlab.ops.coded import encode_rows
from kvlab.ops.numba_support import kernel
from kvlab.ops.views import PageViews


def write_kv(key: torch.Tensor, value: torch.Tensor, views: PageViews, slot_mapping: torch.Tensor) -> None:
    """See `kvlab.ops.write_kv.write_kv`. Serial: a copy of the step's own tokens is not worth waking threads."""
    slots, geometry, codes = slot_mapping.numpy(), views.geometry, views.codes
    for i, (name, rows) in enumerate((("k", key), ("v", value))):
        new_codes, new_scales = encode_rows(views, name, rows)
        _scatter(_bits(new_codes, codes.dtype), slots, codes, geometry[0], geometry[(1, 7)[i]], geometry[2 + i])
        if new_scales is not None:
            _scatter(new_scales.numpy(), slots, views.scales, geometry[0], 1, geometry[4 + i])


def _bits(codes: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    """`codes` as an array of the pages' type; bf16, fp16 and fp8 as integers of their width, packed codes as uint32."""
    if dtype == np.uint32:
        return codes.contiguous().numpy().view(dtype)
    if codes.dtype in (torch.bfloat16, torch.float16):
        return codes.view(torch.int16).numpy().view(dtype)
    return codes.view(torch.uint8).numpy() if codes.dtype == torch.float8_e4m3fn else codes.numpy()


@kernel()
def _scatter(rows, slots, pages, block_size, row_stride, offset) -> None:
    """Copies rows [T, H, W] to pages [num_pages, row elements]; a negative slot is skipped."""
    for t in range(rows.shape[0]):
        if slots[t] < 0:
            continue
        page, token = slots[t] // block_size, slots[t] % block_size
        for h in range(rows.shape[1]):
            start = offset + (h * block_size + token) * row_stride
            target = pages[page, start : start + rows.shape[2]]
            for d in range(rows.shape[2]):
                target[d] = rows[t, h, d]
