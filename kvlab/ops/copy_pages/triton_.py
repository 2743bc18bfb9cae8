"""copy_pages as a Triton kernel: every byte once through registers, 16 at a time.

Traffic: each page read once, written once, without a buffer between. Pages are multiples of 16 bytes and start at one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.ops.triton_support import Launch

BLOCK = 1024  # words of 4 bytes that a program moves


@triton.jit
def copy_rows(p_source, p_target, p_pairs, words, s_page, BLOCK: tl.constexpr):
    """Program (pair, part of a page): pairs are on the axis that has room for more than 65,535."""
    i_pair = tl.program_id(0).to(tl.int64)
    i_from, i_to = tl.load(p_pairs + 2 * i_pair), tl.load(p_pairs + 2 * i_pair + 1)
    o_word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_word = o_word < words
    b_words = tl.load(p_source + i_from.to(tl.int64) * s_page + o_word, mask=m_word, other=0)  # codes
    tl.store(p_target + i_to.to(tl.int64) * s_page + o_word, b_words, mask=m_word)


def copy_launch(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> Launch:
    """The launch of `kvlab.ops.copy_pages.copy_pages`."""
    a, b = source.view(torch.int32), target.view(torch.int32)
    words = a.shape[1]
    args = {"p_source": a, "p_target": b, "p_pairs": pairs.contiguous(), "words": words, "s_page": a.stride(0)}
    return Launch(copy_rows, (len(pairs), -(-words // BLOCK)), args, {"BLOCK": BLOCK}, num_stages=1)
