"""write_rows, one token after the other."""

from __future__ import annotations

import torch


def write_rows(rows: torch.Tensor, stored: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Row t of `rows` [T, width] (codes or metadata) to its slot in `stored` [pages, 1, entries, width]."""
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, stored.shape[2])
            stored[page, 0, offset] = rows[t].to(stored.dtype)
