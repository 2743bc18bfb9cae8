"""The prefill kernel: chunks of new tokens of several sequences, each over its pages up to itself.

One program takes a block of query tokens with all query heads of a KV head, so that a tile of keys is read once for
all of them. Traffic: keys and values up to the block's last token (from its first one's window on), once per block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.ops.attention.triton_chunks import block_of, seen, trunk_of
from kvlab.ops.attention.triton_tiles import add_sink, close, page_rows, scored, soften
from kvlab.ops.attention.triton_whole import whole_scores, whole_sums


@triton.jit
def paged_prefill(
    p_q, p_k, p_v, p_k_scale, p_v_scale, p_sink, p_alibi, p_table, p_len, p_start, p_tree, p_tree_len, p_out,
    scale, softcap, first_seq, num_seqs,
    s_q_row, s_q_head, s_page, s_k_head, s_k_token, s_v_page, s_v_head, s_v_token,
    s_scale_page, s_scale_head, s_scale_token, s_vs_head, s_vs_token, s_table, s_out_row, s_out_head,
    s_tree_seq, s_tree_node,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, SOFT_FP8: tl.constexpr, SCALES: tl.constexpr, SHARED: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Program (block of query tokens, KV head): rows of p_out [T, Hq, DV]. SCALES and SHARED as in `triton_whole`."""
    i_kv, i_seq, o_row, o_head, m_row, o_query, n, low, stop = block_of(
        p_start, p_len, first_seq, num_seqs, GROUP, BLOCK_Q, BLOCK_M, WINDOW, CHUNK
    )
    if low < stop:
        o_d, o_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        o_q = o_row[:, None] * s_q_row + o_head[:, None] * s_q_head + o_d[None, :]
        b_q = tl.load(p_q + o_q, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0).to(COMPUTE)
        b_q_sum = tl.sum(b_q.to(tl.float32), 1)
        b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_M], tl.float32)
        b_acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        p_row, trunk = p_table + i_seq * s_table, trunk_of(p_tree_len, i_seq, n)
        for tile in range(low // BLOCK_N * BLOCK_N, stop, BLOCK_N):
            o_token = tile + tl.arange(0, BLOCK_N)
            m_token = (o_token >= low) & (o_token < stop)
            o_k = page_rows(p_row, o_token, m_token, s_page, s_k_token, PAGE) + i_kv * s_k_head
            m_k = m_token[:, None] & (o_d < D)[None, :]
            b_k = tl.load(p_k + o_k[:, None] + o_d[None, :], mask=m_k, other=0.0)  # codes
            o_scale = page_rows(p_row, o_token, m_token, s_scale_page, s_scale_token, PAGE) + i_kv * s_scale_head
            b_score = whole_scores(b_q, b_q_sum, b_k, p_k_scale, o_scale, m_token, D, SCALES, SHARED, SOFT_FP8, COMPUTE)
            o_away = o_token[None, :] - o_query[:, None]
            b_score = scored(b_score, scale, softcap, p_alibi, o_head, m_row, o_away, SOFTCAP)
            m_seen = seen(o_query, o_token, m_token, trunk, p_tree, i_seq, s_tree_seq, s_tree_node, WINDOW, CHUNK)
            b_score = tl.where(m_seen, b_score, float("-inf"))
            b_weight, b_factor, b_max, b_sum = soften(b_score, b_max, b_sum)
            b_acc *= b_factor[:, None]
            o_v = page_rows(p_row, o_token, m_token, s_v_page, s_v_token, PAGE) + i_kv * s_v_head
            m_v = m_token[:, None] & (o_dv < DV)[None, :]
            b_v = tl.load(p_v + o_v[:, None] + o_dv[None, :], mask=m_v, other=0.0)  # codes
            if SHARED and DV != D:  # values of another width have another number of scales
                o_scale = page_rows(p_row, o_token, m_token, s_scale_page, s_vs_token, PAGE) + i_kv * s_vs_head
            b_acc = whole_sums(b_acc, b_weight, b_v, p_v_scale, o_scale, m_token, DV, SCALES, SHARED, SOFT_FP8, COMPUTE)
        b_acc, b_max, b_sum = add_sink(b_acc, b_max, b_sum, p_sink, o_head, m_row, p_sink is not None)
        b_result, _ = close(b_acc, b_max, b_sum)
        o_out = o_row[:, None] * s_out_row + o_head[:, None] * s_out_head + o_dv[None, :]
        tl.store(p_out + o_out, b_result.to(p_out.dtype.element_ty), mask=m_row[:, None] & (o_dv < DV)[None, :])
