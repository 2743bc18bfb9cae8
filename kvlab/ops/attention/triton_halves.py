"""Tiles of 4-bit rows: two codes a byte, unpacked in registers, never written back wider.

Byte i of a row holds value i in its low half and value i + D / 2 in its high half, so each half of a byte meets one
half of the query: two products where whole codes have one, and no shuffle. D here is half a row's values.

KIND "int4": one fp32 per row, its scale with the zero point in the last 4 mantissa bits, which acts on scores and
weights (of values on the tile where products are of fp16, as in `triton_whole`). "step": fp16 step and smallest value
for every SHARED values; "fp16": codes that count from 8, with an fp16 scale for every SHARED values; "e4m3", "e8m0":
e2m1 codes with such a scale; those act on the tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.ops.attention.triton_tiles import fp8_floats, product, spread


@triton.jit
def half_scores(
    b_q_low, b_q_high, b_q_sum, b_codes, p_meta, m_token, D: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr,
    SHARED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Products fp32 [M, N] of queries, given as halves [M, D] and sums [M], and the keys of bytes [N, D]."""
    if KIND == "int4":
        b_step, b_zero = scale_and_zero(p_meta, m_token)
        b_score = product(b_q_low, tl.trans((b_codes & 15).to(COMPUTE)))
        b_score += product(b_q_high, tl.trans((b_codes >> 4).to(COMPUTE)))
        b_score = (b_score - b_q_sum[:, None] * b_zero[None, :]) * b_step[None, :]
    else:
        b_one, b_two = halves(b_codes, p_meta, m_token, D, N, KIND, SHARED, COMPUTE)
        b_score = product(b_q_low, tl.trans(b_one)) + product(b_q_high, tl.trans(b_two))
    return b_score


@triton.jit
def half_sums(
    b_low, b_high, b_weight, b_codes, p_meta, m_token, D: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr,
    SHARED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The sums fp32 [M, D] of both halves, `b_low` and `b_high`, with the values of bytes [N, D] by weight added.

    NaN in a scale reaches every query of the block, as in `whole_sums`."""
    if KIND == "int4" and tl.float16 == COMPUTE:  # a small weight times a small scale would vanish in it
        b_step, b_zero = scale_and_zero(p_meta, m_token)
        b_one = ((b_codes & 15).to(tl.float32) - b_zero[:, None]) * b_step[:, None]
        b_two = ((b_codes >> 4).to(tl.float32) - b_zero[:, None]) * b_step[:, None]
        b_low += product(b_weight.to(COMPUTE), b_one.to(COMPUTE))
        b_high += product(b_weight.to(COMPUTE), b_two.to(COMPUTE))
    elif KIND == "int4":
        b_step, b_zero = scale_and_zero(p_meta, m_token)
        b_part = (b_weight * b_step[None, :]).to(COMPUTE)
        b_shift = tl.sum(b_part.to(tl.float32) * b_zero[None, :], 1)[:, None]
        b_low += product(b_part, (b_codes & 15).to(COMPUTE)) - b_shift
        b_high += product(b_part, (b_codes >> 4).to(COMPUTE)) - b_shift
    else:
        b_one, b_two = halves(b_codes, p_meta, m_token, D, N, KIND, SHARED, COMPUTE)
        b_low += product(b_weight.to(COMPUTE), b_one)
        b_high += product(b_weight.to(COMPUTE), b_two)
    return b_low, b_high


@triton.jit
def scale_and_zero(p_scale, m_token):
    """(scale, zero point) fp32 [N] of rows: the zero point lies in the scale's last 4 mantissa bits."""
    b_both = tl.load(p_scale, mask=m_token, other=0.0)
    return b_both, (b_both.to(tl.int32, bitcast=True) & 15).to(tl.float32)


@triton.jit
def halves(
    b_codes, p_meta, m_token, D: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr, SHARED: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """The two halves of rows, [N, width of the tile] each, decoded with a scale for every SHARED values."""
    if b_codes.shape[1] == D and D % SHARED == 0:
        b_one, b_two = whole_groups(b_codes, p_meta, m_token, D, N, KIND, SHARED)
    else:
        b_one, b_two = cut_groups(b_codes, p_meta, m_token, D, KIND, SHARED)
    return b_one.to(COMPUTE), b_two.to(COMPUTE)


@triton.jit
def whole_groups(b_codes, p_meta, m_token, D: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr, SHARED: tl.constexpr):
    """As `halves`, fp32, where a half is the tile's width and whole groups: each scale is loaded once."""
    COUNT: tl.constexpr = D // SHARED  # groups in a half
    o_group = tl.arange(0, COUNT)
    m_group = m_token[:, None] & (o_group < COUNT)[None, :]
    if KIND == "step":
        p_low = p_meta[:, None] + 2 * o_group[None, :]
        b_step_low = spread(tl.load(p_low, mask=m_group, other=0.0), N, D)
        b_step_high = spread(tl.load(p_low + 2 * COUNT, mask=m_group, other=0.0), N, D)
        b_least_low = spread(tl.load(p_low + 1, mask=m_group, other=0.0), N, D)
        b_least_high = spread(tl.load(p_low + 2 * COUNT + 1, mask=m_group, other=0.0), N, D)
        b_one = (b_codes & 15).to(tl.float32) * b_step_low + b_least_low
        b_two = (b_codes >> 4).to(tl.float32) * b_step_high + b_least_high
    else:
        p_low = p_meta[:, None] + o_group[None, :]
        b_low = spread(scale_floats(tl.load(p_low, mask=m_group, other=0), KIND), N, D)
        b_high = spread(scale_floats(tl.load(p_low + COUNT, mask=m_group, other=0), KIND), N, D)
        b_one, b_two = code_floats(b_codes & 15, KIND) * b_low, code_floats(b_codes >> 4, KIND) * b_high
    return b_one, b_two


@triton.jit
def cut_groups(b_codes, p_meta, m_token, D: tl.constexpr, KIND: tl.constexpr, SHARED: tl.constexpr):
    """As `halves`, fp32, for any D: every value loads the scale of its group, which the halves' border may cut.

    What the tile has beyond D gets scales of 0.
    """
    o_d = tl.arange(0, b_codes.shape[1])
    m_value = m_token[:, None] & (o_d < D)[None, :]
    o_low, o_high = (o_d // SHARED)[None, :], ((o_d + D) // SHARED)[None, :]
    if KIND == "step":
        p_low, p_high = p_meta[:, None] + 2 * o_low, p_meta[:, None] + 2 * o_high
        b_one = (b_codes & 15).to(tl.float32) * tl.load(p_low, mask=m_value, other=0.0).to(tl.float32)
        b_two = (b_codes >> 4).to(tl.float32) * tl.load(p_high, mask=m_value, other=0.0).to(tl.float32)
        b_one += tl.load(p_low + 1, mask=m_value, other=0.0).to(tl.float32)
        b_two += tl.load(p_high + 1, mask=m_value, other=0.0).to(tl.float32)
    else:
        b_low = scale_floats(tl.load(p_meta[:, None] + o_low, mask=m_value, other=0), KIND)
        b_high = scale_floats(tl.load(p_meta[:, None] + o_high, mask=m_value, other=0), KIND)
        b_one, b_two = code_floats(b_codes & 15, KIND) * b_low, code_floats(b_codes >> 4, KIND) * b_high
    return b_one, b_two


@triton.jit
def scale_floats(b_bits, KIND: tl.constexpr):
    """Scales as fp32: "fp16" as they are, of those given as uint8 "e4m3" an 8-bit float, "e8m0" an exponent, whose 255 is
    NaN."""
    if KIND == "fp16":
        return b_bits.to(tl.float32)
    if KIND == "e4m3":
        return fp8_floats(b_bits, tl.float32)
    b_wide = b_bits.to(tl.int32)
    # exponent 0 stands for 2**-127, which fp32 holds as a subnormal number
    b_value = tl.where(b_wide == 0, 0x00400000, b_wide << 23).to(tl.float32, bitcast=True)
    return tl.where(b_wide == 255, float("nan"), b_value)


@triton.jit
def code_floats(b_code, KIND: tl.constexpr):
    """fp32 of codes 0 .. 15 under a scale: "fp16" whole numbers that count from 8, else e2m1."""
    return b_code.to(tl.float32) - 8.0 if KIND == "fp16" else e2m1_floats(b_code)


@triton.jit
def e2m1_floats(b_code):
    """fp32 of e2m1 codes 0 .. 15: sign, exponent and mantissa moved to their places in an fp16, times 2**14."""
    b_wide = b_code.to(tl.int16)
    b_bits = ((b_wide & 8) << 12) | ((b_wide & 7) << 9)
    return b_bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
