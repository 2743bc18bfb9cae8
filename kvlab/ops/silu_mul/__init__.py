"""The gate of a SwiGLU feed-forward layer."""

from __future__ import annotations

import torch

from kvlab.ops.silu_mul import reference


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, [T, F], of gate and up side by side in `gate_up` [T, 2F]."""
    return reference.silu_mul(gate_up)
