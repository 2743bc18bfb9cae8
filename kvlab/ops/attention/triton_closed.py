"""The decode kernel over closed groups (KIVI): keys with a scale per channel, values with one per token.

A group's keys lie channel by channel, its values token by token, so that what shares a scale lies together. A byte holds
2 or 4 codes a whole run apart: of keys the same token in other channels, of values the same channel in other tokens.
Bytes are loaded as they lie, the runs put one below the other in registers, and a tile of tokens in their natural order
meets the query. Traffic: a group's codes and scales once, for all query heads of a KV head. The tokens that are in no
closed group yet are `triton_decode`'s, and `triton_merge` makes one result of both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.ops.attention.triton_tiles import finish, place, product, scored, soften, spread


@triton.jit
def closed_decode(
    p_q, p_k, p_v, p_k_scale, p_v_scale, p_alibi, p_table, p_len, p_closed, p_out, p_lse,
    scale, softcap,
    s_q_row, s_q_head, s_k_page, s_k_head, s_k_entry, s_v_page, s_v_head, s_v_entry,
    s_ks_page, s_ks_head, s_ks_entry, s_vs_page, s_vs_head, s_vs_entry, s_table,
    s_out_row, s_out_head, s_out_split, s_lse_row, s_lse_split,
    GROUP: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr, ENTRIES: tl.constexpr, GROUPS: tl.constexpr,
    SHARED: tl.constexpr, COUNT: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Program (head block, split, sequence): p_out fp32 [B, splits, Hq, DV], p_lse [B, splits, Hq].

    p_closed [B]: tokens in groups that the query reads as closed. BLOCK_R: channels of a run of keys, a power of two;
    SHARED: values that share a scale, COUNT of them in a row. ENTRIES: groups of a page, GROUPS: of a tile.
    """
    RUNS: tl.constexpr = 8 // BITS
    N: tl.constexpr = GROUPS * TOKENS
    i_kv, i_seq, o_head, m_head, n, first, stop = place(p_len, None, GROUP, BLOCK_H, SPLIT, WINDOW, CHUNK)
    stop = tl.minimum(stop, tl.load(p_closed + i_seq))
    o_c, o_run, o_dv = tl.arange(0, RUNS * BLOCK_R), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_DV)
    # what stands at place o_c of a tile of keys: run by run, each filled up to a power of two
    o_channel, m_channel = o_c // BLOCK_R * (D // RUNS) + o_c % BLOCK_R, o_c % BLOCK_R < D // RUNS
    b_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_H], tl.float32)
    b_acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    if first < stop:
        o_q = i_seq * s_q_row + o_head[:, None] * s_q_head + o_channel[None, :]
        b_q = tl.load(p_q + o_q, mask=m_head[:, None] & m_channel[None, :], other=0.0).to(COMPUTE)
        for tile in range(first // N * GROUPS, (stop + TOKENS - 1) // TOKENS, GROUPS):
            o_group = tile + tl.arange(0, GROUPS)
            m_group = (o_group * TOKENS < stop) & (o_group * TOKENS + TOKENS > first)
            o_page = tl.load(p_table + i_seq * s_table + o_group // ENTRIES, mask=m_group, other=0).to(tl.int64)
            o_entry = (o_group % ENTRIES).to(tl.int64)
            o_token = tile * TOKENS + tl.arange(0, N)
            m_token = (o_token >= first) & (o_token < stop)

            o_k = o_page * s_k_page + o_entry * s_k_entry + i_kv * s_k_head
            o_byte = o_run[None, :, None] * TOKENS + tl.arange(0, TOKENS)[None, None, :]
            m_byte = m_group[:, None, None] & (o_run < D // RUNS)[None, :, None]
            b_k = tl.load(p_k + o_k[:, None, None] + o_byte, mask=m_byte, other=0)  # codes
            b_k = tl.reshape(tl.permute(runs(b_k, BITS), (1, 2, 0, 3)), [RUNS * BLOCK_R, N])
            o_pair = (o_page * s_ks_page + o_entry * s_ks_entry + i_kv * s_ks_head)[None, :] + 2 * o_channel[:, None]
            m_pair = m_group[None, :] & m_channel[:, None]
            b_step = tl.load(p_k_scale + o_pair, mask=m_pair, other=0.0)
            b_low = tl.load(p_k_scale + o_pair + 1, mask=m_pair, other=0.0)
            b_key = b_k.to(tl.float32) * spread(b_step, RUNS * BLOCK_R, N) + spread(b_low, RUNS * BLOCK_R, N)
            o_away = (o_token - n + 1)[None, :]
            b_score = product(b_q, b_key.to(COMPUTE))
            b_score = scored(b_score, scale, softcap, p_alibi, o_head, m_head, o_away, SOFTCAP)
            b_score = tl.where(m_token[None, :], b_score, float("-inf"))
            b_weight, b_factor, b_max, b_sum = soften(b_score, b_max, b_sum)

            o_v = o_page * s_v_page + o_entry * s_v_entry + i_kv * s_v_head
            o_byte = tl.arange(0, TOKENS // RUNS)[None, :, None] * DV + o_dv[None, None, :]
            m_byte = m_group[:, None, None] & (o_dv < DV)[None, None, :]
            b_v = tl.load(p_v + o_v[:, None, None] + o_byte, mask=m_byte, other=0)  # codes
            b_v = tl.reshape(runs(b_v, BITS), [N, BLOCK_DV])
            o_vs = o_page * s_vs_page + o_entry * s_vs_entry + i_kv * s_vs_head
            o_row = tl.reshape(tl.broadcast_to(o_vs[:, None], [GROUPS, TOKENS]), [N])
            o_part = (tl.arange(0, N) % TOKENS)[:, None] * (DV // SHARED) + tl.arange(0, COUNT)[None, :]
            m_part = m_token[:, None] & (tl.arange(0, COUNT) < DV // SHARED)[None, :]
            b_step = tl.load(p_v_scale + o_row[:, None] + 2 * o_part, mask=m_part, other=0.0)
            b_low = tl.load(p_v_scale + o_row[:, None] + 2 * o_part + 1, mask=m_part, other=0.0)
            b_value = b_v.to(tl.float32) * spread(b_step, N, BLOCK_DV) + spread(b_low, N, BLOCK_DV)
            b_acc = b_acc * b_factor[:, None] + product(b_weight.to(COMPUTE), b_value.to(COMPUTE))
    b_result = finish(b_acc, b_max, b_sum, p_lse, None, i_seq, o_head, m_head, s_lse_row, s_lse_split, False)
    o_out = i_seq * s_out_row + tl.program_id(1).to(tl.int64) * s_out_split + o_head * s_out_head
    m_out = m_head[:, None] & (o_dv < DV)[None, :] & (first < stop)
    tl.store(p_out + o_out[:, None] + o_dv[None, :], b_result.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def runs(b_bytes, BITS: tl.constexpr):
    """The codes uint8 [G, runs, R, N] of bytes [G, R, N]: run r is bits r * BITS and up."""
    if BITS == 4:
        return tl.permute(tl.join(b_bytes & 15, b_bytes >> 4), (0, 3, 1, 2))
    else:  # the compiler wants one type behind an `if`, so each way has its own
        b_even, b_odd = tl.join(b_bytes & 3, (b_bytes >> 4) & 3), tl.join((b_bytes >> 2) & 3, b_bytes >> 6)
        # [G, R, N, 0 or 2, 0 or 1] -> [G, run, R, N]
        b_codes = tl.permute(tl.join(b_even, b_odd), (0, 3, 4, 1, 2))
        return tl.reshape(b_codes, [b_bytes.shape[0], 4, b_bytes.shape[1], b_bytes.shape[2]])
