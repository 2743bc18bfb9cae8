"""Rows to codes inside a kernel: the encoders of `kvlab.quant`, step by step, for rows in fp32.

Values come as [M, groups, S], the S values of a group sharing a scale; a place beyond the row's end holds 0 and is not
`m_live` [1, groups, S]. Codes come back as int32 of that shape, scales as [M, groups]. Divisions are rounded to nearest
as on the host (a device's own `/` is not), so codes and scales have the bits that `encode` gives.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUND: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and taking it away rounds to the nearest even
SMALLEST: tl.constexpr = tl.constexpr(1.1754943508222875e-38)  # smallest normal fp32, as in `kvlab.quant.int8`
INFINITY: tl.constexpr = tl.constexpr(float("inf"))


@triton.jit
def whole_numbers(b_x, LOW: tl.constexpr, HIGH: tl.constexpr):
    """The nearest whole numbers from LOW to HIGH, int32, half way between two the even one; 0 for NaN."""
    b_x = tl.where(b_x == b_x, b_x, 0.0)
    b_x = tl.minimum(tl.maximum(b_x, LOW), HIGH)
    return ((b_x + ROUND) - ROUND).to(tl.int32)


@triton.jit
def largest(b_x):
    """The largest value of each group, [M, groups, 1]; NaN where one is NaN, which a maximum may drop."""
    b_odd = tl.max((b_x != b_x).to(tl.int32), 2, keep_dims=True)
    return tl.where(b_odd > 0, float("nan"), tl.max(b_x, 2, keep_dims=True))


@triton.jit
def ends(b_x, m_live):
    """(smallest, largest) value of each group, [M, groups, 1] each."""
    return -largest(tl.where(m_live, -b_x, -INFINITY)), largest(tl.where(m_live, b_x, -INFINITY))


@triton.jit
def scale_to(b_large, MAX: tl.constexpr):
    """The scale under which `b_large` becomes MAX; 1 for zero, NaN for NaN and infinity."""
    b_scale = tl.maximum(tl.div_rn(b_large, MAX), SMALLEST)
    b_scale = tl.where(b_large == 0.0, 1.0, b_scale)
    return tl.where(tl.abs(b_large) < INFINITY, b_scale, float("nan"))


@triton.jit
def int8_codes(b_x):
    """As `kvlab.quant.int8.encode`."""
    b_scale = scale_to(largest(tl.abs(b_x)), 127.0)
    return whole_numbers(tl.div_rn(b_x, b_scale), -127.0, 127.0), b_scale


@triton.jit
def int8_asym_codes(b_x, m_live):
    """(codes, step, smallest value), as `kvlab.quant.int8_asym.encode`."""
    b_low, b_high = ends(b_x, m_live)
    b_step = tl.maximum(tl.div_rn(b_high - b_low, 255.0), SMALLEST)
    b_step = tl.where(tl.abs(b_high - b_low) < INFINITY, b_step, float("nan"))
    return whole_numbers(tl.div_rn(b_x - b_low, b_step), 0.0, 255.0), b_step, b_low


@triton.jit
def int4_codes(b_x, SYMMETRIC: tl.constexpr):
    """As `kvlab.quant.int4.encode` and `encode_symmetric`: the zero point in the scale's last 4 bits."""
    if SYMMETRIC:
        b_step = tl.div_rn(largest(tl.abs(b_x)), 7.0)
        b_zero = tl.full(b_step.shape, 8, tl.int32)
    else:
        b_low, b_high = -largest(-b_x), largest(b_x)
        b_low, b_high = tl.where(b_low > 0.0, 0.0, b_low), tl.where(b_high < 0.0, 0.0, b_high)
        b_step = tl.div_rn(b_high - b_low, 15.0)
        b_zero = whole_numbers(tl.div_rn(-b_low, b_step), 0.0, 15.0)
    b_scale = tl.where(b_step == 0.0, 1.0, tl.maximum(b_step, SMALLEST))
    b_scale = tl.where(tl.abs(b_step) < INFINITY, b_scale, float("nan"))
    b_scale = ((b_scale.to(tl.int32, bitcast=True) & -16) | b_zero).to(tl.float32, bitcast=True)
    b_part = tl.div_rn(b_x, b_scale)
    b_code = tl.where(b_part == b_part, whole_numbers(b_part, -16.0, 16.0) + b_zero, 0)
    LEAST: tl.constexpr = 1 if SYMMETRIC else 0
    return tl.minimum(tl.maximum(b_code, LEAST), 15), b_scale


@triton.jit
def step_codes(b_x, m_live, BITS: tl.constexpr):
    """(codes, step fp16, smallest value fp16), as `kvlab.quant.groups.encode`."""
    MOST: tl.constexpr = 2**BITS - 1.0
    b_low, b_high = ends(b_x, m_live)
    b_low = b_low.to(tl.float16)
    b_step = tl.div_rn(b_high - b_low.to(tl.float32), MOST).to(tl.float16)
    b_step = tl.where(b_step == 0.0, 1.0, b_step).to(tl.float16)
    b_part = tl.div_rn(b_x - b_low.to(tl.float32), b_step.to(tl.float32))
    return whole_numbers(b_part, 0.0, MOST), b_step, b_low


@triton.jit
def signed_codes(b_x, LARGEST: tl.constexpr):
    """(codes, scale fp16), as `kvlab.quant.groups.encode_signed`."""
    b_scale = tl.div_rn(largest(tl.abs(b_x)), LARGEST).to(tl.float16)
    b_scale = tl.where(b_scale == 0.0, 1.0, b_scale).to(tl.float16)
    return whole_numbers(tl.div_rn(b_x, b_scale.to(tl.float32)), -LARGEST, LARGEST), b_scale


@triton.jit
def nvfp4_codes(b_x):
    """As `kvlab.quant.nvfp4.encode`; scales as bits of e4m3."""
    b_large = largest(tl.abs(b_x))
    b_scale = tl.maximum(tl.div_rn(b_large, 6.0), 0.001953125)
    b_bits = fp8_bits(tl.where(b_large < INFINITY, b_scale, float("nan")), 3)
    b_wide = b_bits.to(tl.int32)
    b_scale = ((b_wide << 20).to(tl.float32, bitcast=True)) * 1.329227995784916e36  # 2**120: the bias from 7 to 127
    b_part = tl.div_rn(b_x, tl.where(b_wide == 0x7F, float("nan"), b_scale))
    return e2m1_codes(tl.where(b_part == b_part, b_part, 0.0)), b_bits


@triton.jit
def mxfp4_codes(b_x):
    """As `kvlab.quant.mxfp4.encode`; scales as exponents."""
    b_large = largest(tl.abs(b_x))
    b_exponent = tl.maximum((b_large.to(tl.int32, bitcast=True) >> 23) - 2, 0)
    m_fine = b_large < INFINITY
    b_exponent = tl.where((b_large == 0.0) | (m_fine == 0), 124, b_exponent)
    # exponent 0 stands for 2**-127, which fp32 holds as a subnormal number
    b_scale = tl.where(b_exponent == 0, 0x00400000, b_exponent << 23).to(tl.float32, bitcast=True)
    return e2m1_codes(tl.div_rn(b_x, b_scale)), tl.where(m_fine, b_exponent, 255).to(tl.uint8)


@triton.jit
def e2m1_codes(b_x):
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, as `kvlab.quant.e2m1.to_codes`."""
    b_abs = tl.abs(b_x)
    b_code = (b_abs > 0.25).to(tl.int32) + (b_abs >= 0.75).to(tl.int32) + (b_abs > 1.25).to(tl.int32)
    b_code += (b_abs >= 1.75).to(tl.int32) + (b_abs > 2.5).to(tl.int32) + (b_abs >= 3.5).to(tl.int32)
    b_code += (b_abs > 5.0).to(tl.int32)
    return b_code | ((b_x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def fp8_bits(b_x, MANTISSA: tl.constexpr):
    """fp8 bits, uint8, of fp32 values: e4m3 with 3 bits of mantissa, e5m2 with 2. Clamped to the largest value, rounded
    to nearest even, NaN for NaN and infinity."""
    MAX: tl.constexpr = 448.0 if MANTISSA == 3 else 57344.0
    UNIT: tl.constexpr = 512.0 if MANTISSA == 3 else 65536.0  # 1 / the smallest value above zero
    DROPPED: tl.constexpr = 23 - MANTISSA
    BIAS: tl.constexpr = 120 if MANTISSA == 3 else 112  # of the exponent: from 127 to 7 or 15
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_abs = tl.minimum(tl.abs(b_x), MAX)
    b_small = ((b_abs * UNIT + ROUND) - ROUND).to(tl.int32)
    b_large = b_abs.to(tl.int32, bitcast=True)
    b_large = (b_large + (2 ** (DROPPED - 1) - 1) + ((b_large >> DROPPED) & 1)) >> DROPPED
    b_code = tl.where(b_abs * UNIT < 2**MANTISSA, b_small, b_large - BIAS * 2**MANTISSA)
    b_code = tl.where((b_x - b_x) == 0.0, b_code, 0x7F)
    return (b_code | ((b_bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def hadamard(b_x, o_d, D: tl.constexpr):
    """Rows [M, BLOCK_D] turned as `kvlab.quant.hadamard.turn`, in blocks of the largest power of two that divides D.

    Sums and differences of pairs, log2(block) times, then one factor: another order of summing than a product with the
    matrix, so a value may differ in its last bits, and a code by one where it lies half way between two.
    """
    BLOCK: tl.constexpr = D & -D
    STEPS: tl.constexpr = (BLOCK > 1) + (BLOCK > 2) + (BLOCK > 4) + (BLOCK > 8) + (BLOCK > 16) + (BLOCK > 32) + (
        BLOCK > 64) + (BLOCK > 128) + (BLOCK > 256)  # fmt: skip
    for step in tl.static_range(STEPS):
        o_pair = tl.broadcast_to((o_d ^ (1 << step))[None, :], b_x.shape)
        b_pair = tl.gather(b_x, o_pair, 1)
        b_x = tl.where(((o_d >> step) & 1)[None, :] == 0, b_x + b_pair, b_pair - b_x)
    return b_x * BLOCK**-0.5
