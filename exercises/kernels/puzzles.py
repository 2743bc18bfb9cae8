"""Six kernels to write: see README.md. Names as in kvlab: p_ pointer, o_ offsets, s_ stride in elements."""

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
    pass  # your kernel


@triton.jit
def gather(
    p_pages, p_table, p_out, n, s_page, PAGE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Task 2. Bring a sequence's rows together. One program per BLOCK tokens.

    p_pages: fp32 [num_pages, PAGE, D], s_page elements from one page to the next, rows side by side in a page.
    p_table: int32, the block table. p_out: fp32 [n, D].
    Slots that hold no token are NaN, and so is your output if you read one. D is a power of two here.
    """
    pass  # your kernel


@triton.jit
def scores(
    p_q, p_pages, p_table, p_out, n, scale, s_page, PAGE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Task 3. Products of one query with keys in pages. One program per BLOCK tokens.

    p_q: fp32 [D], D not a power of two: tl.arange wants one, so take the next and a mask.
    p_pages, p_table, s_page: as in task 2; a row has D values.
    p_out: fp32 [n], scale * (q . key of token t). Nothing may be written behind n.
    """
    pass  # your kernel


@triton.jit
def decode(
    p_q, p_k, p_v, p_table, p_out, n, scale, s_page, PAGE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Task 4. Attention of one query over its pages, BLOCK tokens at a time. One program.

    p_q: fp32 [D]. p_k, p_v: fp32 [num_pages, PAGE, D], s_page elements between pages. p_out: fp32 [D].
    Keep the highest score, the sum of exponentials against it, and the weighted values; when a higher score comes,
    scale down what was summed. n may be 0: then the output is 0, and not 0 / 0.
    """
    pass  # your kernel


@triton.jit
def merge(
    p_parts, p_lse, p_out, S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Task 5. Results over S parts of a sequence, made one. One program.

    p_parts: fp32 [S, D], attention over each part alone; of an empty part NaN.
    p_lse: fp32 [S], natural logarithm of each part's sum of exponentials; -inf for an empty part.
    p_out: fp32 [D], attention over all parts together; 0 where all are empty.
    """
    pass  # your kernel


@triton.jit
def packed_scores(
    p_q, p_codes, p_scale, p_zero, p_out, n, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Task 6. Products of a query with 4-bit keys, without writing them out wider. One program.

    p_q: fp32 [2 * HALF]. p_codes: uint8 [n, HALF]; byte i of a row has code i in its low 4 bits and code i + HALF in
    its high 4. p_scale, p_zero: fp32 [n]; value = scale * (code - zero).
    p_out: fp32 [n]. Scale and zero point are one number per row: use them on the score, not on the codes.
    """
    pass  # your kernel
