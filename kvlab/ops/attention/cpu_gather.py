"""A sequence's pages copied into contiguous fp32 rows, for chunks that read them many times."""

from __future__ import annotations

import numba
import numpy as np
import torch

from kvlab.ops.numba_support import kernel, launch
from kvlab.ops.views import PageViews
from kvlab.quant.rows import row_codes, row_floats, zero_point


def gather_rows(views: PageViews, pages: np.ndarray, low: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Decoded (key, value), fp32 [Hkv, end - low, D] and [.., Dv], of positions low .. end - 1 of a sequence with table `pages`."""
    heads = views.k.shape[1]
    key = torch.empty((heads, end - low, views.key_dim))
    value = torch.empty((heads, end - low, views.value_dim))
    flags = (views.format == "bf16", views.k_scale is not None)
    launch(_gather, views.codes, views.scales, views.geometry, pages, low, flags, key.numpy(), value.numpy())
    return key, value


@kernel(parallel=True)
def _gather(codes, scales, geometry, pages, low, flags, key, value) -> None:
    block_size, k_stride, k_offset, v_offset, k_scales, v_scales, _, v_stride = geometry
    is_bf16, scaled = flags
    heads, tokens, key_dim = key.shape
    value_dim = value.shape[2]
    for item in numba.prange(heads * ((tokens + 63) // 64)):
        h, first = item % heads, item // heads * 64
        bits = np.empty(max(key_dim, value_dim), np.uint32)
        for t in range(first, min(first + 64, tokens)):
            page = pages[(low + t) // block_size]
            row = h * block_size + (low + t) % block_size
            k_scale, v_scale = np.float32(1), np.float32(1)
            k_zero, v_zero = np.float32(0), np.float32(0)
            if scaled:
                k_scale, v_scale = scales[page, k_scales + row], scales[page, v_scales + row]
                k_zero = zero_point(codes, scales, page, k_scales + row)
                v_zero = zero_point(codes, scales, page, v_scales + row)
            start = k_offset + row * k_stride
            stop = start + row_codes(codes, key_dim)
            _copy(row_floats(codes[page, start:stop], is_bf16, bits), k_zero, k_scale, key[h, t])
            start = v_offset + row * v_stride
            stop = start + row_codes(codes, value_dim)
            _copy(row_floats(codes[page, start:stop], is_bf16, bits), v_zero, v_scale, value[h, t])


@kernel()
def _copy(row, zero, factor, out) -> None:
    for d in range(out.shape[0]):
        out[d] = (row[d] - zero) * factor
