"""The decode kernel: one query per sequence over its pages, cut into splits of a fixed number of tokens.

Traffic: each split reads its keys, values, scales and block table entries once, for all query heads of a KV head
(up to BLOCK_H of them). A split writes its result and the log2 of its sum; `triton_merge` makes one of them. Where
the cuts lie depends on positions alone, so a result has the same bits whatever else is in the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.ops.attention.triton_tiles import finish, page_rows, place, scored, soften
from kvlab.ops.attention.triton_whole import whole_scores, whole_sums


@triton.jit
def paged_decode(
    p_q, p_k, p_v, p_k_scale, p_v_scale, p_sink, p_alibi, p_table, p_len, p_first, p_out, p_lse,
    scale, softcap,
    s_q_row, s_q_head, s_page, s_k_head, s_k_token, s_v_page, s_v_head, s_v_token,
    s_scale_page, s_scale_head, s_scale_token, s_vs_head, s_vs_token, s_table, s_out_row, s_out_head, s_out_split,
    s_lse_row, s_lse_split,
    GROUP: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, ALONE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, SOFT_FP8: tl.constexpr, SCALES: tl.constexpr,
    SHARED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Program (head block, split, sequence). p_out [B, Hq, DV], or of a split that is not
    ALONE fp32 [B, splits, Hq, DV] with p_lse [B, splits, Hq]. Tokens before p_first [B], if given, are left out.
    SCALES and SHARED as in `triton_whole`.
    """
    i_kv, i_seq, o_head, m_head, n, first, stop = place(p_len, p_first, GROUP, BLOCK_H, SPLIT, WINDOW, CHUNK)
    o_d, o_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    b_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_H], tl.float32)
    b_acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    if first < stop:
        o_q = i_seq * s_q_row + o_head[:, None] * s_q_head + o_d[None, :]
        b_q = tl.load(p_q + o_q, mask=m_head[:, None] & (o_d < D)[None, :], other=0.0).to(COMPUTE)
        b_q_sum = tl.sum(b_q.to(tl.float32), 1)
        p_row = p_table + i_seq * s_table
        for tile in range(first // BLOCK_N * BLOCK_N, stop, BLOCK_N):
            o_token = tile + tl.arange(0, BLOCK_N)
            m_token = (o_token >= first) & (o_token < stop)
            o_k = page_rows(p_row, o_token, m_token, s_page, s_k_token, PAGE) + i_kv * s_k_head
            m_k = m_token[:, None] & (o_d < D)[None, :]
            b_k = tl.load(p_k + o_k[:, None] + o_d[None, :], mask=m_k, other=0.0)  # codes
            o_scale = page_rows(p_row, o_token, m_token, s_scale_page, s_scale_token, PAGE) + i_kv * s_scale_head
            b_score = whole_scores(b_q, b_q_sum, b_k, p_k_scale, o_scale, m_token, D, SCALES, SHARED, SOFT_FP8, COMPUTE)
            o_away = (o_token - n + 1)[None, :]
            b_score = scored(b_score, scale, softcap, p_alibi, o_head, m_head, o_away, SOFTCAP)
            b_score = tl.where(m_token[None, :], b_score, float("-inf"))
            b_weight, b_factor, b_max, b_sum = soften(b_score, b_max, b_sum)
            b_acc *= b_factor[:, None]
            o_v = page_rows(p_row, o_token, m_token, s_v_page, s_v_token, PAGE) + i_kv * s_v_head
            m_v = m_token[:, None] & (o_dv < DV)[None, :]
            b_v = tl.load(p_v + o_v[:, None] + o_dv[None, :], mask=m_v, other=0.0)  # codes
            if SHARED and DV != D:  # values of another width have another number of scales
                o_scale = page_rows(p_row, o_token, m_token, s_scale_page, s_vs_token, PAGE) + i_kv * s_vs_head
            b_acc = whole_sums(b_acc, b_weight, b_v, p_v_scale, o_scale, m_token, DV, SCALES, SHARED, SOFT_FP8, COMPUTE)
    b_result = finish(b_acc, b_max, b_sum, p_lse, p_sink, i_seq, o_head, m_head, s_lse_row, s_lse_split, ALONE)
    o_out = i_seq * s_out_row + tl.program_id(1).to(tl.int64) * s_out_split + o_head * s_out_head
    # an empty split writes no result: the merge leaves it out by its -inf
    m_out = m_head[:, None] & (o_dv < DV)[None, :] & (ALONE | (first < stop))
    tl.store(p_out + o_out[:, None] + o_dv[None, :], b_result.to(p_out.dtype.element_ty), mask=m_out)
