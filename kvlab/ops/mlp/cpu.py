"""mlp for few rows, one launch. Traffic: the three weight matrices, once."""

from __future__ import annotations

import numba
import numpy as np
import torch

from kvlab.ops.linear.cpu import WEIGHT_ROWS, add_block
from kvlab.ops.mlp import MLPWeights
from kvlab.ops.norm.cpu import norm_row
from kvlab.ops.numba_support import kernel, launch

_NONE = np.empty(0, np.float32)


def mlp(x: torch.Tensor, weights: MLPWeights) -> torch.Tensor:
    """See `kvlab.ops.mlp.mlp`; fp32 only."""
    w = weights
    y = x.clone(memory_format=torch.contiguous_format)
    biases = tuple(_NONE if b is None else b.numpy() for b in (w.gate_up_bias, w.down_bias))
    launch(_mlp, y.numpy(), w.norm.numpy(), float(w.eps), w.gate_up.numpy(), w.down.numpy(), biases)
    return y


@kernel(parallel=True)
def _mlp(y, norm, eps, gate_up, down, biases) -> None:
    gate_up_bias, down_bias = biases
    rows, width = y.shape[0], down.shape[1]
    normed = np.empty_like(y)
    for t in range(rows):
        norm_row(y[t], norm, eps, normed[t])
        if down_bias.shape[0]:
            y[t] += down_bias
    hidden = np.zeros((rows, 2 * width), np.float32)
    if gate_up_bias.shape[0]:
        for t in range(rows):
            hidden[t] = gate_up_bias
    for block in numba.prange((2 * width + WEIGHT_ROWS - 1) // WEIGHT_ROWS):
        add_block(normed, gate_up, block * WEIGHT_ROWS, hidden)
    active = np.empty((rows, width), np.float32)
    for t in range(rows):
        silu_mul_row(hidden[t], active[t])
    for block in numba.prange((down.shape[0] + WEIGHT_ROWS - 1) // WEIGHT_ROWS):
        add_block(active, down, block * WEIGHT_ROWS, y)


@kernel()
def silu_mul_row(gate_up: np.ndarray, out: np.ndarray) -> None:
    """out = silu(gate) * up for one row, gate and up side by side."""
    width = out.shape[0]
    for i in range(width):
        gate = gate_up[i]
        out[i] = gate / (np.float32(1) + np.exp(-gate)) * gate_up[i + width]
