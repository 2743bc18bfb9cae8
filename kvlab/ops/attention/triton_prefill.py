"""The prefill kernel: chunks of new tokens of several sequences, each over its pages up to itself.

One program takes a block of query tokens with all query heads of a KV head, so that a tile of keys is read once for
all of them. Traffic: keys and values up to the block's last token (from its first one's window on), once per block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.ops.attention.triton_tiles import (
    LOG2E,
    add_sink,
    capped,
    close,
    first_seen,
    floats,
    page_rows,
    product,
    soften,
)  # fmt: skip


@triton.jit
def paged_prefill(
    p_q, p_k, p_v, p_k_scale, p_v_scale, p_sink, p_alibi, p_table, p_len, p_start, p_tree, p_tree_len, p_out,
    scale, softcap, first_seq, num_seqs,
    s_q_row, s_q_head, s_page, s_k_head, s_k_token, s_v_page, s_v_head, s_v_token,
    s_scale_page, s_scale_head, s_scale_token, s_table, s_out_row, s_out_head,
    s_tree_seq, s_tree_node,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, SOFT_FP8: tl.constexpr, SCALES: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Program (block of query tokens, KV head); row r of a block is token r // GROUP, head r % GROUP of the KV head."""
    i_kv = tl.program_id(1).to(tl.int64)
    i_seq, i_block = sequence_of(p_start, tl.program_id(0), first_seq, num_seqs, BLOCK_Q)
    begin, end, n = tl.load(p_start + i_seq), tl.load(p_start + i_seq + 1), tl.load(p_len + i_seq)
    o_row = tl.arange(0, BLOCK_M)
    o_new = i_block * BLOCK_Q + o_row // GROUP  # which of the sequence's new tokens
    m_row = (o_row < BLOCK_Q * GROUP) & (o_new < end - begin) & (n > 0)
    if (i_block * BLOCK_Q < end - begin) & (n > 0):
        o_token_row = (begin + o_new).to(tl.int64)
        o_head = i_kv * GROUP + o_row % GROUP
        before = n - (end - begin)  # tokens cached before this step
        o_query = before + o_new
        stop = tl.minimum(n, before + (i_block + 1) * BLOCK_Q)
        if p_tree is not None:
            trunk = n - tl.load(p_tree_len + i_seq).to(tl.int32)  # slots from here on are the tree's nodes
        low = first_seen(before + i_block * BLOCK_Q, WINDOW, CHUNK)

        o_d, o_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
        o_q = o_token_row[:, None] * s_q_row + o_head[:, None] * s_q_head + o_d[None, :]
        b_q = tl.load(p_q + o_q, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0).to(COMPUTE)
        b_q_sum = tl.sum(b_q.to(tl.float32), 1)
        b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_M], tl.float32)
        b_acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        p_row = p_table + i_seq * s_table
        for tile in range(low // BLOCK_N * BLOCK_N, stop, BLOCK_N):
            o_token = tile + tl.arange(0, BLOCK_N)
            m_token = (o_token >= low) & (o_token < stop)
            o_k = page_rows(p_row, o_token, m_token, s_page, s_k_token, PAGE) + i_kv * s_k_head
            m_k = m_token[:, None] & (o_d < D)[None, :]
            b_k = tl.load(p_k + o_k[:, None] + o_d[None, :], mask=m_k, other=0.0)  # codes
            b_score = product(b_q, tl.trans(floats(b_k, COMPUTE, SOFT_FP8)))
            if SCALES:
                o_scale = page_rows(p_row, o_token, m_token, s_scale_page, s_scale_token, PAGE) + i_kv * s_scale_head
                b_score *= tl.load(p_k_scale + o_scale, mask=m_token, other=0.0)[None, :]
            if SCALES == 2:
                b_score += b_q_sum[:, None] * tl.load(p_k_scale + o_scale + 1, mask=m_token, other=0.0)[None, :]
            b_score = capped(b_score * scale, softcap, SOFTCAP) * LOG2E
            if p_alibi is not None:
                b_slope = tl.load(p_alibi + o_head, mask=m_row, other=0.0).to(tl.float32) * LOG2E
                b_score += b_slope[:, None] * (o_token[None, :] - o_query[:, None]).to(tl.float32)
            m_seen = o_token[None, :] <= o_query[:, None]
            if WINDOW:
                m_seen &= o_token[None, :] > o_query[:, None] - WINDOW
            if CHUNK:
                m_seen &= o_token[None, :] >= (o_query // CHUNK * CHUNK)[:, None]
            if p_tree is not None:
                # what stands before the tree is seen by all, a node by itself and its descendants
                m_node = (o_query >= trunk)[:, None] & (o_token >= trunk)[None, :] & m_seen & m_token[None, :]
                o_node = i_seq * s_tree_seq + (o_query - trunk).to(tl.int64)[:, None] * s_tree_node
                m_seen &= tl.load(p_tree + o_node + (o_token - trunk)[None, :], mask=m_node, other=1) != 0
            b_score = tl.where(m_seen & m_token[None, :], b_score, float("-inf"))
            b_weight, b_factor, b_max, b_sum = soften(b_score, b_max, b_sum)
            b_acc *= b_factor[:, None]
            if SCALES == 2:
                b_low = tl.load(p_v_scale + o_scale + 1, mask=m_token, other=0.0)
                b_acc += tl.sum(b_weight * b_low[None, :], 1)[:, None]
            if SCALES:
                b_weight *= tl.load(p_v_scale + o_scale, mask=m_token, other=0.0)[None, :]
            o_v = page_rows(p_row, o_token, m_token, s_v_page, s_v_token, PAGE) + i_kv * s_v_head
            m_v = m_token[:, None] & (o_dv < DV)[None, :]
            b_v = tl.load(p_v + o_v[:, None] + o_dv[None, :], mask=m_v, other=0.0)  # codes
            b_acc += product(b_weight.to(COMPUTE), floats(b_v, COMPUTE, SOFT_FP8))
        b_acc, b_max, b_sum = add_sink(b_acc, b_max, b_sum, p_sink, o_head, m_row, p_sink is not None)
        b_result, _ = close(b_acc, b_max, b_sum)
        o_out = o_token_row[:, None] * s_out_row + o_head[:, None] * s_out_head + o_dv[None, :]
        tl.store(p_out + o_out, b_result.to(p_out.dtype.element_ty), mask=m_row[:, None] & (o_dv < DV)[None, :])


@triton.jit
def sequence_of(p_start, program, first_seq, num_seqs, BLOCK_Q: tl.constexpr):
    """(sequence, int64; its block) of a program. Sequence b's blocks begin at (start[b] - base) // BLOCK_Q + b - first:
    room for a last block that is not full, so the launch needs no lengths on the host."""
    base = tl.load(p_start + first_seq)
    low, high = first_seq, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        at = (tl.load(p_start + middle) - base) // BLOCK_Q + middle - first_seq
        low, high = tl.where(at <= program, middle, low), tl.where(at <= program, high, middle)
    at = (tl.load(p_start + low) - base) // BLOCK_Q + low - first_seq
    return low.to(tl.int64), program - at
