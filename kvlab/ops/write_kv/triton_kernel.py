"""The cache write: a token's keys turned by its position, keys and values encoded and put in their slots, in one pass.

Traffic: the new keys and values are read once, with one row of the cosine and sine table per token, and their codes
and scales written once. Nothing of a page is read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.ops.triton_codes import e4m3_bits, int8_rows


@triton.jit
def write_rows(
    p_key, p_value, p_cos, p_sin, p_position, p_slot, p_k, p_v, p_k_scale, p_v_scale,
    s_key_row, s_key_head, s_value_row, s_value_head, s_angle, s_k_page, s_k_head, s_k_token, s_v_page, s_v_head,
    s_v_token, s_scale_page, s_scale_head,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Program (token, head block). HALF is R / 2 of the rotated values, 0 for none."""
    i_token = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slot + i_token).to(tl.int64)
    if slot >= 0:
        i_page, i_slot = slot // PAGE, slot % PAGE
        o_head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
        m_head = o_head < HEADS
        o_d, o_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        m_k, m_v = m_head[:, None] & (o_d < D)[None, :], m_head[:, None] & (o_dv < DV)[None, :]
        p_row = p_key + i_token * s_key_row + o_head[:, None] * s_key_head
        b_key = tl.load(p_row + o_d[None, :], mask=m_k, other=0.0).to(tl.float32)
        if HALF:
            b_key = turned(
                b_key, p_row, p_cos, p_sin, tl.load(p_position + i_token).to(tl.int64), s_angle, o_d, m_k, HALF
            )
        o_value = i_token * s_value_row + o_head[:, None] * s_value_head
        b_value = tl.load(p_value + o_value + o_dv[None, :], mask=m_v, other=0.0).to(tl.float32)
        o_scale = i_page * s_scale_page + o_head * s_scale_head + i_slot
        o_k = i_page * s_k_page + o_head * s_k_head + i_slot * s_k_token
        put(p_k + o_k[:, None] + o_d[None, :], p_k_scale, o_scale, b_key, m_k, m_head, KIND)
        o_v = i_page * s_v_page + o_head * s_v_head + i_slot * s_v_token
        put(p_v + o_v[:, None] + o_dv[None, :], p_v_scale, o_scale, b_value, m_v, m_head, KIND)


@triton.jit
def turned(b_key, p_row, p_cos, p_sin, i_position, s_angle, o_d, m_k, HALF: tl.constexpr):
    """Rows with value i and i + HALF turned by the position's angle; values from 2 * HALF on as they are."""
    m_turn = o_d < 2 * HALF
    o_other = tl.where(o_d < HALF, o_d + HALF, tl.where(m_turn, o_d - HALF, o_d))
    b_other = tl.load(p_row + o_other[None, :], mask=m_k, other=0.0).to(tl.float32)
    o_angle = i_position * s_angle + o_d % HALF
    b_cos = tl.load(p_cos + o_angle, mask=m_turn, other=1.0).to(tl.float32)
    b_sin = tl.load(p_sin + o_angle, mask=m_turn, other=0.0).to(tl.float32)
    b_sin = tl.where(o_d < HALF, -b_sin, b_sin)
    return b_key * b_cos[None, :] + b_other * b_sin[None, :]


@triton.jit
def put(p_rows, p_scale, o_scale, b_x, m_x, m_head, KIND: tl.constexpr):
    """Stores rows as codes: KIND "plain" rounds to the pages' type, "int8" adds scales, "fp8" gives bits."""
    if KIND == "int8":
        b_code, b_scale = int8_rows(b_x)
        tl.store(p_rows, b_code, mask=m_x)
        tl.store(p_scale + o_scale, b_scale, mask=m_head)
    elif KIND == "fp8":
        tl.store(p_rows, e4m3_bits(b_x), mask=m_x)
    else:
        tl.store(p_rows, b_x.to(p_rows.dtype.element_ty), mask=m_x)
