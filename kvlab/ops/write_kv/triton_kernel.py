"""The cache write: a token's keys turned by its position, keys and values encoded and put in their slots, in one pass.

Traffic: the new keys and values are read once, with one row of the cosine and sine table per token, and their codes
and scales written once. Nothing of a page is read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.ops.triton_codes import (
    fp8_bits,
    hadamard,
    int4_codes,
    int8_asym_codes,
    int8_codes,
    largest,
    mxfp4_codes,
    nvfp4_codes,
    scale_to,
    signed_codes,
    step_codes,
)


@triton.jit
def write_rows(
    p_key, p_value, p_cos, p_sin, p_position, p_slot, p_k, p_v, p_k_scale, p_v_scale, p_k_fixed, p_v_fixed,
    s_key_row, s_key_head, s_value_row, s_value_head, s_angle, s_k_page, s_k_head, s_k_token, s_v_page, s_v_head,
    s_v_token, s_ks_page, s_ks_head, s_ks_token, s_vs_page, s_vs_head, s_vs_token,
    s_kf_head, s_kf_value, s_vf_head, s_vf_value,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr,
    BITS: tl.constexpr, SHARED: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Program (token, head block). HALF, PAIRS as `turned`, HALF 0 for none; KIND, BITS, SHARED as `put`.

    p_k_fixed, p_v_fixed: fixed scales [Hkv or 1, D or 1], None for none. TURN: by a Hadamard matrix, before encoding.
    """
    i_token = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slot + i_token).to(tl.int64)
    if slot >= 0:
        i_page, i_slot = slot // PAGE, slot % PAGE
        o_head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
        m_head = o_head < HEADS
        o_d, o_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        m_k = m_head[:, None] & (o_d < D)[None, :]
        p_row = p_key + i_token * s_key_row + o_head[:, None] * s_key_head
        b_key = tl.load(p_row + o_d[None, :], mask=m_k, other=0.0).to(tl.float32)
        if HALF:
            i_position = tl.load(p_position + i_token).to(tl.int64)
            b_key = turned(b_key, p_row, p_cos, p_sin, i_position, s_angle, o_d, m_k, HALF, PAIRS)
        b_key = prepared(b_key, p_k_fixed, o_head, m_head, o_d, s_kf_head, s_kf_value, D, TURN)
        o_k = i_page * s_k_page + o_head * s_k_head + i_slot * s_k_token
        o_ks = i_page * s_ks_page + o_head * s_ks_head + i_slot * s_ks_token
        put(p_k, o_k, p_k_scale, o_ks, b_key, m_head, D, KIND, BITS, SHARED)

        o_value = i_token * s_value_row + o_head[:, None] * s_value_head
        m_v = m_head[:, None] & (o_dv < DV)[None, :]
        b_value = tl.load(p_value + o_value + o_dv[None, :], mask=m_v, other=0.0).to(tl.float32)
        b_value = prepared(b_value, p_v_fixed, o_head, m_head, o_dv, s_vf_head, s_vf_value, DV, TURN)
        o_v = i_page * s_v_page + o_head * s_v_head + i_slot * s_v_token
        o_vs = i_page * s_vs_page + o_head * s_vs_head + i_slot * s_vs_token
        put(p_v, o_v, p_v_scale, o_vs, b_value, m_head, DV, KIND, BITS, SHARED)


@triton.jit
def turned(b_key, p_row, p_cos, p_sin, i_position, s_angle, o_d, m_k, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Rows with value i and i + HALF (PAIRS: 2i and 2i + 1) turned by the position's i-th angle; values from 2 * HALF on
    as they are."""
    m_turn = o_d < 2 * HALF
    if PAIRS:
        m_first, o_pair = o_d % 2 == 0, o_d // 2
        o_other = tl.where(m_turn, tl.where(m_first, o_d + 1, o_d - 1), o_d)
    else:
        m_first, o_pair = o_d < HALF, o_d % HALF
        o_other = tl.where(m_turn, tl.where(m_first, o_d + HALF, o_d - HALF), o_d)
    b_other = tl.load(p_row + o_other[None, :], mask=m_k, other=0.0).to(tl.float32)
    o_angle = i_position * s_angle + o_pair
    b_cos = tl.load(p_cos + o_angle, mask=m_turn, other=1.0).to(tl.float32)
    b_sin = tl.load(p_sin + o_angle, mask=m_turn, other=0.0).to(tl.float32)
    b_sin = tl.where(m_first, -b_sin, b_sin)
    return b_key * b_cos[None, :] + b_other * b_sin[None, :]


@triton.jit
def prepared(b_x, p_fixed, o_head, m_head, o_d, s_head, s_value, D: tl.constexpr, TURN: tl.constexpr):
    """Rows as their format encodes them: divided by fixed scales, turned by a Hadamard matrix, or as they are."""
    if p_fixed is not None:
        o_fixed = o_head[:, None] * s_head + o_d.to(tl.int64)[None, :] * s_value
        b_x = tl.div_rn(b_x, tl.load(p_fixed + o_fixed, mask=m_head[:, None] & (o_d < D)[None, :], other=1.0))
    if TURN:
        b_x = hadamard(b_x, o_d, D)
    return b_x


@triton.jit
def put(
    p_codes, o_row, p_scale, o_scale, b_x, m_head, D: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Stores rows [M, BLOCK_D] as codes and scales.

    KIND "plain" rounds to the pages' type; "fp8", "fp8 row" have BITS of mantissa; "int8", "int8 asym", "int4",
    "int4 sym", "step", "signed", "nvfp4", "mxfp4" are the encoders of `triton_codes`. SHARED: values that share a scale, 0: a row.
    """
    M: tl.constexpr = b_x.shape[0]
    SIZE: tl.constexpr = SHARED if SHARED else b_x.shape[1]
    COUNT: tl.constexpr = b_x.shape[1] // SIZE
    o_d, o_group = tl.arange(0, b_x.shape[1]), tl.arange(0, COUNT)
    m_x = m_head[:, None] & (o_d < D)[None, :]
    p_rows = p_codes + o_row[:, None]
    b_group, m_live = tl.reshape(b_x, [M, COUNT, SIZE]), tl.reshape(o_d < D, [1, COUNT, SIZE])
    if KIND == "plain":
        tl.store(p_rows + o_d[None, :], b_x.to(p_codes.dtype.element_ty), mask=m_x)
    elif KIND == "fp8":
        tl.store(p_rows + o_d[None, :], fp8_bits(b_x, BITS), mask=m_x)
    else:
        p_meta = p_scale + o_scale[:, None] + (2 if KIND == "int8 asym" or KIND == "step" else 1) * o_group[None, :]
        m_meta = m_head[:, None] & (o_group * SIZE < D)[None, :]
        if KIND == "int8 asym" or KIND == "step":
            if KIND == "step":
                b_code, b_scale, b_low = step_codes(b_group, m_live, BITS)
            else:
                b_code, b_scale, b_low = int8_asym_codes(b_group, m_live)
            tl.store(p_meta + 1, tl.reshape(b_low, [M, COUNT]), mask=m_meta)
        elif KIND == "fp8 row":
            b_scale = scale_to(largest(tl.abs(b_group)), 448.0 if BITS == 3 else 57344.0)
            b_code = fp8_bits(tl.div_rn(b_group, b_scale), BITS)
        elif KIND == "signed":
            b_code, b_scale = signed_codes(b_group, 127.0 if BITS == 8 else 7.0)
            b_code += 0 if BITS == 8 else 8
        elif KIND == "int8":
            b_code, b_scale = int8_codes(b_group)
        elif KIND == "nvfp4":
            b_code, b_scale = nvfp4_codes(b_group)
        elif KIND == "mxfp4":
            b_code, b_scale = mxfp4_codes(b_group)
        else:
            b_code, b_scale = int4_codes(b_group, KIND == "int4 sym")
        tl.store(p_meta, tl.reshape(b_scale, [M, COUNT]), mask=m_meta)
        b_code = tl.reshape(b_code, [M, COUNT * SIZE])
        if BITS == 8 or KIND == "fp8 row":
            tl.store(p_rows + o_d[None, :], b_code.to(p_codes.dtype.element_ty), mask=m_x)
        elif BITS == 3:
            put_packed(p_rows, b_code & 3, m_head, D, 2)
            put_packed(p_rows + (D + 3) // 4, b_code >> 2, m_head, D, 1)
        else:
            put_packed(p_rows, b_code, m_head, D, BITS)


@triton.jit
def put_packed(p_rows, b_code, m_head, D: tl.constexpr, BITS: tl.constexpr):
    """Stores codes [M, BLOCK_D] of BITS bits in bytes, whose runs lie a stretch apart, as `kvlab.quant.packing.pack`."""
    RUNS: tl.constexpr = 8 // BITS
    STRETCH: tl.constexpr = (D + RUNS - 1) // RUNS
    BLOCK: tl.constexpr = b_code.shape[1] // RUNS
    o_byte = tl.arange(0, BLOCK)
    b_byte = tl.zeros([b_code.shape[0], BLOCK], tl.int32)
    for run in tl.static_range(RUNS):
        o_d = tl.minimum(o_byte + run * STRETCH, b_code.shape[1] - 1)
        b_part = tl.gather(b_code, tl.broadcast_to(o_d[None, :], b_byte.shape), 1)
        b_byte |= tl.where((o_byte + run * STRETCH < D)[None, :], b_part, 0) << (run * BITS)
    tl.store(p_rows + o_byte[None, :], b_byte.to(tl.uint8), mask=m_head[:, None] & (o_byte < STRETCH)[None, :])
