"""The absorbed decode kernel: every head reads the same latents, as keys with their rotary part and as values.

Traffic: a tile of latents is read once from memory and used twice, as key and as value, for BLOCK_H heads; further
heads find it in the L2 cache. 576 values are two tiles, 512 and 64, because a tile's width is a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.ops.attention.triton_tiles import LOG2E, finish, floats, page_rows, place, product, soften


@triton.jit
def mla_decode(
    p_inner, p_turned, p_latent, p_rope, p_table, p_len, p_out, p_lse,
    scale,
    s_inner_row, s_inner_head, s_turned_row, s_turned_head, s_latent_page, s_latent_token, s_rope_page, s_rope_token,
    s_table, s_out_row, s_out_head, s_out_split, s_lse_row, s_lse_split,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, R: tl.constexpr,
    BLOCK_R: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, ALONE: tl.constexpr,
    SOFT_FP8: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Program (head block, split, sequence): weighted latents, p_out [B, H, C] or [B, splits, H, C] with p_lse."""
    _, i_seq, o_head, m_head, _, first, stop = place(p_len, None, HEADS, BLOCK_H, SPLIT, 0, 0)
    o_c, o_r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    b_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_H], tl.float32)
    b_acc = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    if first < stop:
        o_inner = i_seq * s_inner_row + o_head[:, None] * s_inner_head + o_c[None, :]
        b_inner = tl.load(p_inner + o_inner, mask=m_head[:, None] & (o_c < C)[None, :], other=0.0).to(COMPUTE)
        o_turned = i_seq * s_turned_row + o_head[:, None] * s_turned_head + o_r[None, :]
        b_turned = tl.load(p_turned + o_turned, mask=m_head[:, None] & (o_r < R)[None, :], other=0.0).to(COMPUTE)
        p_row = p_table + i_seq * s_table
        for tile in range(first // BLOCK_N * BLOCK_N, stop, BLOCK_N):
            o_token = tile + tl.arange(0, BLOCK_N)
            m_token = (o_token >= first) & (o_token < stop)
            o_latent = page_rows(p_row, o_token, m_token, s_latent_page, s_latent_token, PAGE)[:, None] + o_c[None, :]
            b_latent = tl.load(p_latent + o_latent, mask=m_token[:, None] & (o_c < C)[None, :], other=0.0)  # codes
            o_rope = page_rows(p_row, o_token, m_token, s_rope_page, s_rope_token, PAGE)[:, None] + o_r[None, :]
            b_rope = tl.load(p_rope + o_rope, mask=m_token[:, None] & (o_r < R)[None, :], other=0.0)  # codes
            b_latent = floats(b_latent, COMPUTE, SOFT_FP8)
            b_score = product(b_inner, tl.trans(b_latent))
            b_score += product(b_turned, tl.trans(floats(b_rope, COMPUTE, SOFT_FP8)))
            b_score = tl.where(m_token[None, :], b_score * (scale * LOG2E), float("-inf"))
            b_weight, b_factor, b_max, b_sum = soften(b_score, b_max, b_sum)
            b_acc = b_acc * b_factor[:, None] + product(b_weight.to(COMPUTE), b_latent)
    b_result = finish(b_acc, b_max, b_sum, p_lse, None, i_seq, o_head, m_head, s_lse_row, s_lse_split, ALONE)
    o_out = i_seq * s_out_row + tl.program_id(1).to(tl.int64) * s_out_split + o_head * s_out_head
    m_out = m_head[:, None] & (o_c < C)[None, :] & (ALONE | (first < stop))
    tl.store(p_out + o_out[:, None] + o_c[None, :], b_result.to(p_out.dtype.element_ty), mask=m_out)
