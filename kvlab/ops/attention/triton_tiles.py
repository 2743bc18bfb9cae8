"""Pieces of the attention kernels: addresses of page rows, scores, and the running softmax in powers of two.

Names: p_ pointer, b_ values, o_ offsets or indices, m_ mask, i_ program index, s_ stride in elements. An index that is
multiplied by a stride is int64: 2**31 elements of a pool are reached by a cache of a few GiB.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def page_rows(p_table, o_token, m_token, s_page, s_token, PAGE: tl.constexpr):
    """Offsets, int64 [N], of the rows of tokens `o_token` of one sequence from the start of a head's segment."""
    o_page = tl.load(p_table + o_token // PAGE, mask=m_token, other=0).to(tl.int64)
    o_slot = (o_token % PAGE).to(tl.int64)
    return o_page * s_page + o_slot * s_token


@triton.jit
def fp8_floats(b_bits, dtype: tl.constexpr):
    """fp8 e4m3 given as uint8 in `dtype`, without the instruction for it: its bits moved into an fp16, times 256."""
    b_wide = b_bits.to(tl.int16)
    b_half = ((b_wide & 0x80) << 8) | ((b_wide & 0x7F) << 7)
    b_value = b_half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((b_wide & 0x7F) == 0x7F, float("nan"), b_value).to(dtype)


@triton.jit
def floats(b_codes, dtype: tl.constexpr, SOFT_FP8: tl.constexpr):
    """Codes of one value each as `dtype`."""
    return fp8_floats(b_codes, dtype) if SOFT_FP8 else b_codes.to(dtype)


@triton.jit
def spread(b_group, N: tl.constexpr, D: tl.constexpr):
    """[N, groups] as fp32 [N, D], each value for all of its group."""
    b_wide = b_group.to(tl.float32)[:, :, None]
    SHARED: tl.constexpr = D // b_group.shape[1]
    return tl.reshape(tl.broadcast_to(b_wide, [N, b_group.shape[1], SHARED]), [N, D])


@triton.jit
def product(b_a, b_b):
    """b_a [M, K] times b_b [K, N], summed in fp32; fp32 operands are not rounded to tf32."""
    return tl.dot(b_a, b_b, input_precision="ieee")


@triton.jit
def capped(b_score, softcap, SOFTCAP: tl.constexpr):
    """softcap * tanh(score / softcap), in a form that cannot give inf / inf."""
    if SOFTCAP:
        b_score = softcap * (1.0 - 2.0 / (tl.exp2(b_score * (2.0 * LOG2E) / softcap) + 1.0))
    return b_score


@triton.jit
def scored(b_product, scale, softcap, p_alibi, o_head, m_head, o_away, SOFTCAP: tl.constexpr):
    """Scores [M, N] in powers of two from products of queries and keys; `o_away` [M or 1, N]: key minus query position."""
    b_score = capped(b_product * scale, softcap, SOFTCAP) * LOG2E
    if p_alibi is not None:
        b_slope = tl.load(p_alibi + o_head, mask=m_head, other=0.0).to(tl.float32) * LOG2E
        b_score += b_slope[:, None] * o_away.to(tl.float32)
    return b_score


@triton.jit
def soften(b_score, b_max, b_sum):
    """(weights, factor on what was summed before, largest, sum): the running softmax over one more tile.

    Args:
        b_score: [M, N] in powers of two, -inf where not seen.
        b_max, b_sum: [M], -inf and 0 before the first tile that a row sees something of.
    """
    b_new = tl.maximum(b_max, tl.max(b_score, 1))
    b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)  # -inf - -inf would be NaN
    b_weight = tl.exp2(b_score - b_safe[:, None])
    b_factor = tl.exp2(b_max - b_safe)
    return b_weight, b_factor, b_new, b_sum * b_factor + tl.sum(b_weight, 1)


@triton.jit
def close(b_acc, b_max, b_sum):
    """(result [M, D], log2 of the sum of powers [M]) of rows; a row that saw nothing gives 0 and -inf."""
    b_total = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_lse = tl.where(b_sum == 0.0, float("-inf"), b_max + tl.log2(b_total))
    return b_acc / b_total[:, None], b_lse


@triton.jit
def add_sink(b_acc, b_max, b_sum, p_sink, o_head, m_head, SINKS: tl.constexpr):
    """(acc, largest, sum) with one more score per head that has no value: it enters at the end, so it counts once."""
    if SINKS:
        b_sink = tl.load(p_sink + o_head, mask=m_head, other=float("-inf")).to(tl.float32) * LOG2E
        b_sink = tl.where(b_sum == 0.0, float("-inf"), b_sink)  # a row without tokens stays 0
        b_new = tl.maximum(b_max, b_sink)
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_factor = tl.exp2(b_max - b_safe)
        b_acc, b_sum, b_max = b_acc * b_factor[:, None], b_sum * b_factor + tl.exp2(b_sink - b_safe), b_new
    return b_acc, b_max, b_sum


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The lowest position that a query at `position` sees."""
    low = position * 0
    if WINDOW:
        low = tl.maximum(low, position - (WINDOW - 1))
    if CHUNK:
        low = tl.maximum(low, position // CHUNK * CHUNK)
    return low


@triton.jit
def place(
    p_len, p_first, GROUP: tl.constexpr, BLOCK_H: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """What program (head block, split, sequence) of a decode works on; tokens before p_first [B] are others' work.

    Returns:
        (KV head, sequence, query heads [BLOCK_H], which of them exist, the sequence's length, its first token and the
        one behind its last); ids are int64.
    """
    BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    i_kv, i_seq = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_group = tl.program_id(0) % BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    n = tl.load(p_len + i_seq)
    low = first_seen(n - 1, WINDOW, CHUNK)
    if p_first is not None:
        low = tl.maximum(low, tl.load(p_first + i_seq))
    start = (low // SPLIT + tl.program_id(1)) * SPLIT
    return i_kv, i_seq, i_kv * GROUP + o_group, o_group < GROUP, n, tl.maximum(low, start), tl.minimum(n, start + SPLIT)


@triton.jit
def finish(
    b_acc, b_max, b_sum, p_lse, p_sink, i_seq, o_head, m_head, s_lse_row, s_lse_split, ALONE: tl.constexpr
):  # fmt: skip
    """Result [M, D] of a split, whose log2 of the sum is stored; a split that is alone counts the sinks."""
    if ALONE:
        b_acc, b_max, b_sum = add_sink(b_acc, b_max, b_sum, p_sink, o_head, m_head, p_sink is not None)
    b_result, b_lse = close(b_acc, b_max, b_sum)
    o_lse = i_seq * s_lse_row + tl.program_id(1).to(tl.int64) * s_lse_split + o_head
    tl.store(p_lse + o_lse, b_lse, mask=m_head)
    return b_result
