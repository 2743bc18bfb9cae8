"""Tiles of rows with a code per value: products with queries, sums by weight.

SCALES of a token's row: 0 none, 1 a factor, 2 a step and a smallest value. They act on scores and weights, one number
per token, and not on the tiles of codes. Where there are such for every SHARED values, they act on the tile; so does a
factor of values where products are of fp16, which holds no weight times scale below 6e-8.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.ops.attention.triton_tiles import floats, product, spread


@triton.jit
def whole_scores(
    b_q, b_q_sum, b_codes, p_scale, o_scale, m_token, D: tl.constexpr, SCALES: tl.constexpr, SHARED: tl.constexpr,
    SOFT_FP8: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Products fp32 [M, N] of queries [M, D], whose sums are given [M], and the keys of codes [N, D]."""
    if SHARED:
        b_tile = grouped_floats(b_codes, p_scale + o_scale, m_token, D, SCALES, SHARED)
        return product(b_q, tl.trans(b_tile.to(COMPUTE)))
    b_score = product(b_q, tl.trans(floats(b_codes, COMPUTE, SOFT_FP8)))
    if SCALES:
        b_score *= tl.load(p_scale + o_scale, mask=m_token, other=0.0)[None, :]
    if SCALES == 2:
        b_low = tl.load(p_scale + o_scale + 1, mask=m_token, other=0.0)
        b_score += b_q_sum[:, None] * b_low[None, :]
    return b_score


@triton.jit
def whole_sums(
    b_acc, b_weight, b_codes, p_scale, o_scale, m_token, D: tl.constexpr, SCALES: tl.constexpr, SHARED: tl.constexpr,
    SOFT_FP8: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The sums fp32 [M, D] with the values of codes [N, D] by weight [M, N] added.

    NaN in a live token's values reaches every query of the block, those before the token too: its weight 0 times NaN
    is NaN, as in any attention by tiles.
    """
    if SHARED:
        b_tile = grouped_floats(b_codes, p_scale + o_scale, m_token, D, SCALES, SHARED)
        return b_acc + product(b_weight.to(COMPUTE), b_tile.to(COMPUTE))
    if SCALES == 2:
        b_low = tl.load(p_scale + o_scale + 1, mask=m_token, other=0.0)
        b_acc += tl.sum(b_weight * b_low[None, :], 1)[:, None]
    if SCALES:
        b_scale = tl.load(p_scale + o_scale, mask=m_token, other=0.0)
        if tl.float16 == COMPUTE:  # a small weight times a small scale would vanish in it, a value does not
            b_tile = floats(b_codes, tl.float32, SOFT_FP8) * b_scale[:, None]
            return b_acc + product(b_weight.to(COMPUTE), b_tile.to(COMPUTE))
        b_weight *= b_scale[None, :]
    return b_acc + product(b_weight.to(COMPUTE), floats(b_codes, COMPUTE, SOFT_FP8))


@triton.jit
def grouped_floats(b_codes, p_meta, m_token, D: tl.constexpr, SCALES: tl.constexpr, SHARED: tl.constexpr):
    """Codes [N, width of the tile] decoded, fp32; each scale is loaded once. Beyond the groups of D values it is 0."""
    N: tl.constexpr = b_codes.shape[0]
    WIDTH: tl.constexpr = b_codes.shape[1]
    o_group = tl.arange(0, WIDTH // SHARED)
    m_group = m_token[:, None] & (o_group * SHARED < D)[None, :]
    p_group = p_meta[:, None] + SCALES * o_group[None, :]
    b_value = b_codes.to(tl.float32) * spread(tl.load(p_group, mask=m_group, other=0.0), N, WIDTH)
    if SCALES == 2:
        b_value += spread(tl.load(p_group + 1, mask=m_group, other=0.0), N, WIDTH)
    return b_value
