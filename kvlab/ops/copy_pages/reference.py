"""copy_pages as one indexed copy."""

from __future__ import annotations

import torch


def copy_pages(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """See `kvlab.ops.copy_pages.copy_pages`."""
    target.index_copy_(0, pairs[:, 1], source.index_select(0, pairs[:, 0]))
