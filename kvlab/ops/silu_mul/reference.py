"""silu_mul, written out."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kvlab.ops.silu_mul.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
