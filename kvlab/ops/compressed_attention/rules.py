"""What a token of DeepSeek-V4 reads: the latest rows, and entries of windows long closed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.views import SegmentViews


@dataclass(frozen=True, eq=False)
class Window:
    """Pages of rows ("kv") and their block table; a token reads the last `size`, its own included."""

    views: SegmentViews
    batch: AttentionBatch
    size: int


@dataclass(frozen=True, eq=False)
class Entries:
    """Pages of entries ("entry") and their block table; chosen: int64 [T, k], which each token reads, -1 for none."""

    views: SegmentViews
    batch: AttentionBatch
    chosen: torch.Tensor


def all_entries(batch: AttentionBatch, ratio: int) -> torch.Tensor:
    """int64 [T, k]: every entry whose window had closed when the token came, itself included; -1 behind them."""
    entry = torch.arange(batch.max_seq_len // ratio, device=batch.positions.device)
    ready = torch.div(batch.positions + 1, ratio, rounding_mode="floor")
    return torch.where(entry < ready[:, None], entry, -1)
