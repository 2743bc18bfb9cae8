"""Tiles of rows with a code per value: products with queries, sums by weight.

SCALES of a token's row: 0 none, 1 a factor, 2 a step and a smallest value. They act on scores and weights, one number
per token, and not on the tiles of codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.ops.attention.triton_tiles import floats, product


@triton.jit
def whole_scores(
    b_q, b_q_sum, b_codes, p_scale, o_scale, m_token, SCALES: tl.constexpr, SOFT_FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Products fp32 [M, N] of queries [M, D], whose sums are given [M], and the keys of codes [N, D]."""
    b_score = product(b_q, tl.trans(floats(b_codes, COMPUTE, SOFT_FP8)))
    if SCALES:
        b_score *= tl.load(p_scale + o_scale, mask=m_token, other=0.0)[None, :]
    if SCALES == 2:
        b_low = tl.load(p_scale + o_scale + 1, mask=m_token, other=0.0)
        b_score += b_q_sum[:, None] * b_low[None, :]
    return b_score


@triton.jit
def whole_sums(
    b_acc, b_weight, b_codes, p_scale, o_scale, m_token, SCALES: tl.constexpr, SOFT_FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """The sums fp32 [M, D] with the values of codes [N, D] by weight [M, N] added."""
    if SCALES == 2:
        b_low = tl.load(p_scale + o_scale + 1, mask=m_token, other=0.0)
        b_acc += tl.sum(b_weight * b_low[None, :], 1)[:, None]
    if SCALES:
        b_weight *= tl.load(p_scale + o_scale, mask=m_token, other=0.0)[None, :]
    return b_acc + product(b_weight.to(COMPUTE), floats(b_codes, COMPUTE, SOFT_FP8))
