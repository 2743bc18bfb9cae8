"""Rows to codes inside a kernel: the encoders of `kvlab.quant` for one fp32 row per program lane."""

from __future__ import annotations

import triton
import triton.language as tl

ROUND: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and taking it away rounds to the nearest even
SMALLEST: tl.constexpr = tl.constexpr(1.1754943508222875e-38)  # smallest normal fp32, as in `kvlab.quant.int8`


@triton.jit
def int8_rows(b_x):
    """(codes int8 [M, D], scales fp32 [M]) of rows, symmetric; as `kvlab.quant.int8.encode`."""
    b_large = tl.max(tl.abs(b_x), 1)
    # a maximum may drop NaN: a sum does not
    m_fine = (tl.sum(b_x * 0.0, 1) == 0.0) & (b_large < float("inf"))
    b_scale = tl.maximum(b_large / 127.0, SMALLEST)
    b_scale = tl.where(b_large == 0.0, 1.0, b_scale)
    b_code = tl.where(m_fine[:, None], b_x / b_scale[:, None], 0.0)
    b_code = tl.minimum(tl.maximum((b_code + ROUND) - ROUND, -127.0), 127.0)
    return b_code.to(tl.int8), tl.where(m_fine, b_scale, float("nan"))


@triton.jit
def e4m3_bits(b_x):
    """fp8 e4m3 bits, uint8, of fp32 values: clamped to +-448, rounded to nearest even, NaN for NaN and infinity."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_abs = tl.minimum(tl.abs(b_x), 448.0)
    b_small = ((b_abs * 512.0 + ROUND) - ROUND).to(tl.int32)  # below 2**-6: multiples of 2**-9
    b_large = b_abs.to(tl.int32, bitcast=True)
    b_large = ((b_large + 0x7FFFF + ((b_large >> 20) & 1)) >> 20) - 960  # the exponent's bias from 127 to 7
    b_code = tl.where(b_abs < 0.015625, b_small, b_large)
    b_code = tl.where((b_x - b_x) == 0.0, b_code, 0x7F)
    return (b_code | ((b_bits >> 24) & 0x80)).to(tl.uint8)
