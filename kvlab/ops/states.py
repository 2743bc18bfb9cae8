"""Recurrent states in pages: each sequence reads its state before its new tokens and writes it after them.

A state part has one page per sequence, `block_table[b, 0]`. A sequence whose first token of the step is at position 0
starts from zeros whatever its page holds: pages are reused, and may hold another sequence's state or NaN.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvlab.ops.batch import AttentionBatch

# (rows of the new tokens, state before) -> (result rows, state after)
Recurrence = Callable[[Sequence[Tensor], Tensor], tuple[Tensor, Tensor]]


def use_reference() -> bool:
    """Whether recurrences run token by token: where KVLAB_OPS forces "reference"."""
    return os.environ.get("KVLAB_OPS") == "reference"


def over_sequences(
    inputs: Sequence[Tensor],
    pages: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    *,
    decode: Recurrence,
    chunk: Recurrence,
    in_place: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """`out` [T, ...] filled with the result of a recurrence over every sequence of `batch`; padded rows give zeros.

    Args:
        inputs: each [T, ...].
        pages: [num_pages, elements], the states; changed in place.
        decode: one token for each of b sequences: (inputs [b, ...], states [b, elements]), without host reads.
        chunk: several tokens of one sequence: (inputs [n, ...], state [elements]). States come and go in pages' dtype.
        in_place: instead of `decode`, a kernel that updates the pages of the decodes itself and fills their rows of out.
    """
    n = batch.num_decodes
    if n and in_place is not None:
        in_place(out[:n])
    elif n:
        page, live = batch.block_table[:n, 0].long(), batch.seq_lens[:n, None] > 0
        held = pages.index_select(0, page)
        before = torch.where(live & (batch.positions[:n, None] > 0), held, 0)
        result, after = decode([x[:n] for x in inputs], before)
        # a padded sequence puts back what it found in the null page
        pages.index_copy_(0, page, torch.where(live, after.to(pages.dtype), held))
        out[:n] = torch.where(live.view(n, *[1] * (out.dim() - 1)), result.to(out.dtype), 0)
    row = n
    for b, (count, end) in enumerate(zip(batch.query_lens[n:], batch.ends[n:], strict=True), start=n):
        page = batch.block_table[b, :1].long()
        before = pages.index_select(0, page)[0] if end > count else pages.new_zeros(pages.shape[1])
        result, after = chunk([x[row : row + count] for x in inputs], before)
        pages.index_copy_(0, page, after.to(pages.dtype)[None])
        out[row : row + count] = result
        row += count
    out[row:] = 0
    return out


def wide(state: Tensor) -> Tensor:
    """`state` in fp32, in fp64 where it is that: what sums run in."""
    return state.to(torch.promote_types(state.dtype, torch.float32))
