"""The decode kernel over 4-bit pages, as `triton_decode`, with tiles of two codes a byte (`triton_halves`).

Traffic: half a byte per value and the row's scales; the dequantized tile exists in registers only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.ops.attention.triton_halves import half_scores, half_sums
from kvlab.ops.attention.triton_tiles import finish, page_rows, place, scored, soften


@triton.jit
def paged_decode_packed(
    p_q, p_k, p_v, p_k_scale, p_v_scale, p_sink, p_alibi, p_table, p_len, p_first, p_out, p_lse,
    scale, softcap,
    s_q_row, s_q_head, s_page, s_k_head, s_k_token, s_v_page, s_v_head, s_v_token,
    s_scale_page, s_scale_head, s_scale_token, s_vs_head, s_vs_token, s_table, s_out_row, s_out_head, s_out_split,
    s_lse_row, s_lse_split,
    GROUP: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROW: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, ROW_V: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, ALONE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, KIND: tl.constexpr, SHARED: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Program (head block, split, sequence), as `paged_decode`; D is half a row's values, ROW its bytes with padding;
    DV and ROW_V are those of values."""
    i_kv, i_seq, o_head, m_head, n, first, stop = place(p_len, p_first, GROUP, BLOCK_H, SPLIT, WINDOW, CHUNK)
    o_d, o_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    b_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_H], tl.float32)
    b_low, b_high = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32), tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
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
            b_score = half_scores(
                b_q_low, b_q_high, b_q_sum, b_k, p_k_scale + o_scale, m_token, D, BLOCK_N, KIND, SHARED, COMPUTE
            )
            o_away = (o_token - n + 1)[None, :]
            b_score = scored(b_score, scale, softcap, p_alibi, o_head, m_head, o_away, SOFTCAP)
            b_score = tl.where(m_token[None, :], b_score, float("-inf"))
            b_weight, b_factor, b_max, b_sum = soften(b_score, b_max, b_sum)
            o_v = page_rows(p_row, o_token, m_token, s_v_page, s_v_token, PAGE) + i_kv * s_v_head
            m_code = m_token[:, None] & (o_dv < ROW_V)[None, :]
            b_v = tl.load(p_v + o_v[:, None] + o_dv[None, :], mask=m_code, other=0)  # codes
            if DV != D:  # values of another width have another number of scales
                o_scale = page_rows(p_row, o_token, m_token, s_scale_page, s_vs_token, PAGE) + i_kv * s_vs_head
            b_low, b_high = b_low * b_factor[:, None], b_high * b_factor[:, None]
            b_low, b_high = half_sums(
                b_low, b_high, b_weight, b_v, p_v_scale + o_scale, m_token, DV, BLOCK_N, KIND, SHARED, COMPUTE
            )
    b_low = finish(b_low, b_max, b_sum, p_lse, p_sink, i_seq, o_head, m_head, s_lse_row, s_lse_split, ALONE)
    b_high = finish(b_high, b_max, b_sum, p_lse, p_sink, i_seq, o_head, m_head, s_lse_row, s_lse_split, ALONE)
    o_out = i_seq * s_out_row + tl.program_id(1).to(tl.int64) * s_out_split + o_head * s_out_head
    p_result = p_out + o_out[:, None] + o_dv[None, :]
    m_out = m_head[:, None] & (o_dv < DV)[None, :] & (ALONE | (first < stop))
    tl.store(p_result, b_low.to(p_out.dtype.element_ty), mask=m_out)
    tl.store(p_result + DV, b_high.to(p_out.dtype.element_ty), mask=m_out)
