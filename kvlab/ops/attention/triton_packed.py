"""The decode kernel over 4-bit pages: two codes a byte, unpacked in registers, never written back wider.

Byte i of a row holds value i in its low half and value i + D / 2 in its high half, so each half of a byte meets one
half of the query: two products where `triton_decode` has one, and no shuffle. Traffic: half a byte per value and the
row's scales; the dequantized tile exists in registers only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.ops.attention.triton_tiles import LOG2E, capped, finish, fp8_floats, page_rows, place, product, soften


@triton.jit
def paged_decode_packed(
    p_q, p_k, p_v, p_k_scale, p_v_scale, p_sink, p_alibi, p_table, p_len, p_first, p_out, p_lse,
    scale, softcap,
    s_q_row, s_q_head, s_page, s_k_head, s_k_token, s_v_page, s_v_head, s_v_token,
    s_scale_page, s_scale_head, s_scale_token, s_table, s_out_row, s_out_head, s_out_split, s_lse_row, s_lse_split,
    GROUP: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROW: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, ALONE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, KIND: tl.constexpr, SHARED: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Program (head block, split, sequence), as `paged_decode`; D is half a row's values, ROW its bytes with padding.

    KIND "int4": one fp32 per row, its scale with the zero point in the last 4 mantissa bits, which acts on scores and
    weights. "step": fp16 step and smallest value for every SHARED values; "e4m3", "e8m0": e2m1 codes with a scale for
    every SHARED values; those act on the tile.
    """
    i_kv, i_seq, o_head, m_head, n, first, stop = place(p_len, p_first, GROUP, BLOCK_H, SPLIT, WINDOW, CHUNK)
    o_d = tl.arange(0, BLOCK_D)
    b_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_H], tl.float32)
    b_low, b_high = tl.zeros([BLOCK_H, BLOCK_D], tl.float32), tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    if first < stop:
        p_query = p_q + (i_seq * s_q_row + o_head[:, None] * s_q_head + o_d[None, :])
        m_q = m_head[:, None] & (o_d < D)[None, :]
        b_q_low = tl.load(p_query, mask=m_q, other=0.0).to(COMPUTE)
        b_q_high = tl.load(p_query + D, mask=m_q, other=0.0).to(COMPUTE)
        b_q_sum = tl.sum(b_q_low.to(tl.float32), 1) + tl.sum(b_q_high.to(tl.float32), 1)
        p_row = p_table + i_seq * s_table
        for tile in range(first // BLOCK_N * BLOCK_N, stop, BLOCK_N):
            o_token = tile + tl.arange(0, BLOCK_N)
            m_token = (o_token >= first) & (o_token < stop)
            # a row's padding may be loaded: it holds codes like any, and meets a query of 0
            m_code = m_token[:, None] & (o_d < ROW)[None, :]
            o_k = page_rows(p_row, o_token, m_token, s_page, s_k_token, PAGE) + i_kv * s_k_head
            b_k = tl.load(p_k + o_k[:, None] + o_d[None, :], mask=m_code, other=0)  # codes
            o_scale = page_rows(p_row, o_token, m_token, s_scale_page, s_scale_token, PAGE) + i_kv * s_scale_head
            if KIND == "int4":
                b_step, b_zero = scale_and_zero(p_k_scale + o_scale, m_token)
                b_score = product(b_q_low, tl.trans((b_k & 15).to(COMPUTE)))
                b_score += product(b_q_high, tl.trans((b_k >> 4).to(COMPUTE)))
                b_score = (b_score - b_q_sum[:, None] * b_zero[None, :]) * b_step[None, :]
            else:
                b_one, b_two = halves(b_k, p_k_scale + o_scale, m_token, D, BLOCK_N, KIND, SHARED, COMPUTE)
                b_score = product(b_q_low, tl.trans(b_one)) + product(b_q_high, tl.trans(b_two))
            b_score = capped(b_score * scale, softcap, SOFTCAP) * LOG2E
            if p_alibi is not None:
                b_slope = tl.load(p_alibi + o_head, mask=m_head, other=0.0).to(tl.float32) * LOG2E
                b_score += b_slope[:, None] * (o_token - n + 1).to(tl.float32)[None, :]
            b_score = tl.where(m_token[None, :], b_score, float("-inf"))
            b_weight, b_factor, b_max, b_sum = soften(b_score, b_max, b_sum)
            o_v = page_rows(p_row, o_token, m_token, s_v_page, s_v_token, PAGE) + i_kv * s_v_head
            b_v = tl.load(p_v + o_v[:, None] + o_d[None, :], mask=m_code, other=0)  # codes
            b_low, b_high = b_low * b_factor[:, None], b_high * b_factor[:, None]
            if KIND == "int4":
                b_step, b_zero = scale_and_zero(p_v_scale + o_scale, m_token)
                b_part = (b_weight * b_step[None, :]).to(COMPUTE)
                b_shift = tl.sum(b_part.to(tl.float32) * b_zero[None, :], 1)[:, None]
                b_low += product(b_part, (b_v & 15).to(COMPUTE)) - b_shift
                b_high += product(b_part, (b_v >> 4).to(COMPUTE)) - b_shift
            else:
                b_one, b_two = halves(b_v, p_v_scale + o_scale, m_token, D, BLOCK_N, KIND, SHARED, COMPUTE)
                b_low += product(b_weight.to(COMPUTE), b_one)
                b_high += product(b_weight.to(COMPUTE), b_two)
    b_result_low = finish(b_low, b_max, b_sum, p_lse, p_sink, i_seq, o_head, m_head, s_lse_row, s_lse_split, ALONE)
    b_result_high = finish(b_high, b_max, b_sum, p_lse, p_sink, i_seq, o_head, m_head, s_lse_row, s_lse_split, ALONE)
    o_out = i_seq * s_out_row + tl.program_id(1).to(tl.int64) * s_out_split + o_head * s_out_head
    p_result = p_out + o_out[:, None] + o_d[None, :]
    m_out = m_head[:, None] & (o_d < D)[None, :] & (ALONE | (first < stop))
    tl.store(p_result, b_result_low.to(p_out.dtype.element_ty), mask=m_out)
    tl.store(p_result + D, b_result_high.to(p_out.dtype.element_ty), mask=m_out)


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
    """The two halves of rows, [N, D] each, decoded with a scale for every SHARED values."""
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
        b_one, b_two = e2m1_floats(b_codes & 15) * b_low, e2m1_floats(b_codes >> 4) * b_high
    return b_one.to(COMPUTE), b_two.to(COMPUTE)


@triton.jit
def spread(b_group, N: tl.constexpr, D: tl.constexpr):
    """[N, groups] as fp32 [N, D], each value for all of its group."""
    b_wide = b_group.to(tl.float32)[:, :, None]
    SHARED: tl.constexpr = D // b_group.shape[1]
    return tl.reshape(tl.broadcast_to(b_wide, [N, b_group.shape[1], SHARED]), [N, D])


@triton.jit
def scale_floats(b_bits, KIND: tl.constexpr):
    """Scales given as uint8: "e4m3" an 8-bit float, "e8m0" an exponent, whose 255 is NaN."""
    if KIND == "e4m3":
        return fp8_floats(b_bits, tl.float32)
    b_wide = b_bits.to(tl.int32)
    # exponent 0 stands for 2**-127, which fp32 holds as a subnormal number
    b_value = tl.where(b_wide == 0, 0x00400000, b_wide << 23).to(tl.float32, bitcast=True)
    return tl.where(b_wide == 255, float("nan"), b_value)


@triton.jit
def e2m1_floats(b_code):
    """fp32 of e2m1 codes 0 .. 15: sign, exponent and mantissa moved to their places in an fp16, times 2**14."""
    b_wide = b_code.to(tl.int16)
    b_bits = ((b_wide & 8) << 12) | ((b_wide & 7) << 9)
    return b_bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
