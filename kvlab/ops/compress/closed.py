"""The entries that a step makes, and the slots they go to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlab.ops.batch import AttentionBatch


@dataclass(frozen=True, eq=False)
class Closed:
    """Entries of windows, some of which may not be closed after all (a decode does not wait to know).

    Attributes:
        entries: [n, D], before norm and rotation; of a window that is not closed anything, NaN too.
        sequence, window: int64 [n], whose window it is and which.
        closes: bool [n].
    """

    entries: torch.Tensor
    sequence: torch.Tensor
    window: torch.Tensor
    closes: torch.Tensor


def entry_slots(closed: Closed, batch: AttentionBatch, entries_per_page: int) -> torch.Tensor:
    """Slots int64 [n] of the entries, -1 where a window is not closed.

    Args:
        batch: the step, with the block table of a part that holds one entry per window.
    """
    place = torch.div(closed.window, entries_per_page, rounding_mode="floor")
    page = batch.block_table[closed.sequence, place].long()
    return torch.where(closed.closes, page * entries_per_page + closed.window % entries_per_page, -1)
