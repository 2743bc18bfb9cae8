"""One answer to each puzzle of `puzzles.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slots(
    p_table, p_out, n, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Task 1. Where does each token lie? One program.

    p_table: int32 [pages of the sequence], its block table.
    p_out: int64 [n]; out[t] = table[t // PAGE] * PAGE + t % PAGE.
    n: tokens, at most BLOCK. Entries of the table behind the last page may hold anything: do not read them.
    """
    o = tl.arange(0, BLOCK)
    page = tl.load(p_table + o // PAGE, mask=o < n, other=0).to(tl.int64)
    tl.store(p_out + o, page * PAGE + o % PAGE, mask=o < n)


@triton.jit
def gather(
    p_pages, p_table, p_out, n, s_page, PAGE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Task 2. Bring a sequence's rows together. One program per BLOCK tokens.

    p_pages: fp32 [num_pages, PAGE, D], s_page elements from one page to the next, rows side by side in a page.
    p_table: int32, the block table. p_out: fp32 [n, D].
    Slots that hold no token are NaN, and so is your output if you read one. D is a power of two here.
    """
    o_t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_d = tl.arange(0, D)
    page = tl.load(p_table + o_t // PAGE, mask=o_t < n, other=0).to(tl.int64)
    at = page * s_page + (o_t % PAGE) * D
    live = (o_t < n)[:, None]
    rows = tl.load(p_pages + at[:, None] + o_d[None, :], mask=live, other=0.0)
    tl.store(p_out + o_t[:, None] * D + o_d[None, :], rows, mask=live)


@triton.jit
def scores(
    p_q, p_pages, p_table, p_out, n, scale, s_page, PAGE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Task 3. Products of one query with keys in pages. One program per BLOCK tokens.

    p_q: fp32 [D], D not a power of two: tl.arange wants one, so take the next and a mask.
    p_pages, p_table, s_page: as in task 2; a row has D values.
    p_out: fp32 [n], scale * (q . key of token t). Nothing may be written behind n.
    """
    WIDE: tl.constexpr = triton.next_power_of_2(D)
    o_t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_d = tl.arange(0, WIDE)
    q = tl.load(p_q + o_d, mask=o_d < D, other=0.0)
    page = tl.load(p_table + o_t // PAGE, mask=o_t < n, other=0).to(tl.int64)
    at = page * s_page + (o_t % PAGE) * D
    keys = tl.load(p_pages + at[:, None] + o_d[None, :], mask=(o_t < n)[:, None] & (o_d < D)[None, :], other=0.0)
    tl.store(p_out + o_t, tl.sum(keys * q[None, :], 1) * scale, mask=o_t < n)


@triton.jit
def decode(
    p_q, p_k, p_v, p_table, p_out, n, scale, s_page, PAGE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Task 4. Attention of one query over its pages, BLOCK tokens at a time. One program.

    p_q: fp32 [D]. p_k, p_v: fp32 [num_pages, PAGE, D], s_page elements between pages. p_out: fp32 [D].
    Keep the highest score, the sum of exponentials against it, and the weighted values; when a higher score comes,
    scale down what was summed. n may be 0: then the output is 0, and not 0 / 0.
    """
    o_d = tl.arange(0, D)
    q = tl.load(p_q + o_d)
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([D], tl.float32)
    for tile in range(0, n, BLOCK):
        o_t = tile + tl.arange(0, BLOCK)
        live = o_t < n
        page = tl.load(p_table + o_t // PAGE, mask=live, other=0).to(tl.int64)
        at = (page * s_page + (o_t % PAGE) * D)[:, None] + o_d[None, :]
        keys = tl.load(p_k + at, mask=live[:, None], other=0.0)
        score = tl.where(live, tl.sum(keys * q[None, :], 1) * scale, float("-inf"))
        higher = tl.maximum(best, tl.max(score, 0))
        weight, factor = tl.exp(score - higher), tl.exp(best - higher)
        values = tl.load(p_v + at, mask=live[:, None], other=0.0)
        acc = acc * factor + tl.sum(weight[:, None] * values, 0)
        total, best = total * factor + tl.sum(weight, 0), higher
    tl.store(p_out + o_d, acc / tl.where(total == 0, 1.0, total))


@triton.jit
def merge(
    p_parts, p_lse, p_out, S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Task 5. Results over S parts of a sequence, made one. One program.

    p_parts: fp32 [S, D], attention over each part alone; of an empty part NaN.
    p_lse: fp32 [S], natural logarithm of each part's sum of exponentials; -inf for an empty part.
    p_out: fp32 [D], attention over all parts together; 0 where all are empty.
    """
    o_s, o_d = tl.arange(0, S), tl.arange(0, D)
    lse = tl.load(p_lse + o_s)
    best = tl.max(lse, 0)
    weight = tl.exp(lse - tl.where(best == float("-inf"), 0.0, best))
    live = (lse > float("-inf"))[:, None]
    parts = tl.load(p_parts + o_s[:, None] * D + o_d[None, :], mask=live, other=0.0)
    total = tl.sum(weight, 0)
    tl.store(p_out + o_d, tl.sum(parts * weight[:, None], 0) / tl.where(total == 0, 1.0, total))


@triton.jit
def packed_scores(
    p_q, p_codes, p_scale, p_zero, p_out, n, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Task 6. Products of a query with 4-bit keys, without writing them out wider. One program.

    p_q: fp32 [2 * HALF]. p_codes: uint8 [n, HALF]; byte i of a row has code i in its low 4 bits and code i + HALF in
    its high 4. p_scale, p_zero: fp32 [n]; value = scale * (code - zero).
    p_out: fp32 [n]. Scale and zero point are one number per row: use them on the score, not on the codes.
    """
    o_t, o_d = tl.arange(0, BLOCK), tl.arange(0, HALF)
    live = o_t < n
    low, high = tl.load(p_q + o_d), tl.load(p_q + HALF + o_d)
    codes = tl.load(p_codes + o_t[:, None] * HALF + o_d[None, :], mask=live[:, None], other=0)
    score = tl.sum((codes & 15).to(tl.float32) * low[None, :], 1) + tl.sum((codes >> 4).to(tl.float32) * high[None, :], 1)
    zero = tl.load(p_zero + o_t, mask=live, other=0.0)
    scale = tl.load(p_scale + o_t, mask=live, other=0.0)
    tl.store(p_out + o_t, (score - zero * (tl.sum(low, 0) + tl.sum(high, 0))) * scale, mask=live)
