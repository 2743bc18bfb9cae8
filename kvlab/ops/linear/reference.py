"""linear, as torch does it."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """See `kvlab.ops.linear.linear`."""
    y = F.linear(x, weight, bias)
    return y if residual is None else y + residual
