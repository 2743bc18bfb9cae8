"""write_rows as one scatter, without host reads."""

from __future__ import annotations

import torch

from kvlab.ops.coded import put


def write_rows(rows: torch.Tensor, stored: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """See `kvlab.ops.write_rows.reference`. A padded row rewrites what stands at slot 0 of the null page."""
    live, slot = slot_mapping >= 0, slot_mapping.clamp_min(0)
    page = torch.div(slot, stored.shape[2], rounding_mode="floor")
    put(stored, (page, 0, slot % stored.shape[2]), rows, live)
