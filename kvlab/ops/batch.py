"""One flat ragged batch, as attention sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from kvlab.ops.tree import TreeMask


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """The tokens of one step: decodes first (one token each), then prefill chunks, then padded rows.

    A padded sequence has seq_lens 0; a padded row has slot -1. Neither reads or writes a page, and both give zeros.

    Attributes:
        query_start_loc: int32 [B + 1], row of each sequence's first token; rows from the last entry on are padding.
        seq_lens: int32 [B], tokens in the cache after this step.
        block_table: int32 [B, width], page ids; 0 is the null page.
        slot_mapping: int64 [T], page * block_size + offset of each token's entry, -1 for padding.
        positions: int64 [T], position of each token in its sequence.
        num_seqs, num_tokens: B and T.
        max_query_len, max_seq_len: upper bounds over the batch.
        num_decodes: the first `num_decodes` sequences have exactly one token.
        query_lens, ends: new tokens and final length of each live sequence, on the host: what loops over prefill
            chunks go by. Decodes are not looped over.
        closed: int32 [B, width], block table of the closed groups of a layer that has them (`GroupedViews`).
        tree: which of its last tokens each token sees, where a sequence ends in a tree; None: all before itself.
        memory: what an operation works out once for all layers of the step, under names of its own.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    num_seqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    num_decodes: int
    query_lens: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    tree: TreeMask | None = None
    closed: torch.Tensor | None = None
    # not an argument, so that a batch made from another by `replace` begins with none
    memory: dict[Any, Any] = field(init=False, default_factory=dict)

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(query_start_loc, seq_lens, block_table) as NumPy views; CPU only."""
        return self.query_start_loc.numpy(), self.seq_lens.numpy(), np.ascontiguousarray(self.block_table.numpy())


def make_batch(
    query_lens: list[int], seq_lens: list[int], block_table: torch.Tensor, block_size: int, padded_rows: int = 0
) -> AttentionBatch:
    """The batch of sequences with `query_lens` new tokens ending at `seq_lens`; for tests, tools and chapters.

    Args:
        block_table: int32 [B, width] on the device the batch is for.

    Raises:
        ValueError: lists of different lengths, or decodes (one token) after longer chunks.
    """
    if not len(query_lens) == len(seq_lens) == len(block_table):
        raise ValueError(
            f"query_lens {len(query_lens)}, seq_lens {len(seq_lens)}: must match {len(block_table)} tables"
        )
    decodes = next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens))
    table = block_table.tolist()
    starts, positions, slots = [0], [], []
    for n, end, pages in zip(query_lens, seq_lens, table, strict=True):
        starts.append(starts[-1] + n)
        for t in range(end - n, end):
            positions.append(max(t, 0))
            slots.append(pages[t // block_size] * block_size + t % block_size if t >= 0 else -1)
    positions += [0] * padded_rows
    slots += [-1] * padded_rows
    device = block_table.device
    return AttentionBatch(
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table.to(torch.int32),
        torch.tensor(slots, dtype=torch.int64, device=device),
        torch.tensor(positions, dtype=torch.int64, device=device),
        num_seqs=len(seq_lens),
        num_tokens=len(slots),
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
        num_decodes=decodes,
        query_lens=tuple(query_lens),
        ends=tuple(seq_lens),
    )
