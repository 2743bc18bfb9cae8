"""mlp, composed of the small operations."""

from __future__ import annotations

import torch

from kvlab.ops.linear import linear
from kvlab.ops.mlp import MLPWeights
from kvlab.ops.norm import rms_norm
from kvlab.ops.silu_mul import silu_mul


def mlp(x: torch.Tensor, weights: MLPWeights) -> torch.Tensor:
    """See `kvlab.ops.mlp.mlp`."""
    w = weights
    gate_up = linear(rms_norm(x, w.norm, w.eps), w.gate_up, w.gate_up_bias)
    return linear(silu_mul(gate_up), w.down, w.down_bias, residual=x)
