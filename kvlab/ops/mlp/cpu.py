"""mlp for few rows, one launch. Traffic: the three weight matrices, once."""

from __future__ import annotations

import numba
import numpy as np
import torch

from kvlab.ops.attention.cpu_math import exp_all
from kvlab.ops.linear.cpu import WEIGHT_ROWS, add_block, prepare
from kvlab.ops.mlp import MLPWeights
from kvlab.ops.norm.cpu import norm_row
from kvlab.ops.numba_support import kernel, launch

_NONE = np.empty(0, np.float32)
_HIGHEST = np.float32(88)  # exp of more is beyond fp32


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
    gate, up = np.zeros((rows, width), np.float32), np.zeros((rows, width), np.float32)
    if gate_up_bias.shape[0]:
        for t in range(rows):
            gate[t], up[t] = gate_up_bias[:width], gate_up_bias[width:]
    w_gate, w_up = gate_up[:width], gate_up[width:]
    packed = prepare(normed)
    for block in numba.prange((width + WEIGHT_ROWS - 1) // WEIGHT_ROWS):
        first = block * WEIGHT_ROWS
        add_block(normed, packed, w_gate, first, gate)
        add_block(normed, packed, w_up, first, up)
        silu_mul_block(gate, up, first)
    packed = prepare(gate)
    for block in numba.prange((down.shape[0] + WEIGHT_ROWS - 1) // WEIGHT_ROWS):
        add_block(gate, packed, down, block * WEIGHT_ROWS, y)


@kernel()
def silu_mul_block(gate: np.ndarray, up: np.ndarray, first: int) -> None:
    """gate = silu(gate) * up, in place, in the columns of one block of weight rows."""
    last = min(first + WEIGHT_ROWS, gate.shape[1])
    count = last - first
    powers = np.empty(gate.shape[0] * count, np.float32)
    for t in range(gate.shape[0]):
        for i in range(count):
            x = -gate[t, first + i]
            powers[t * count + i] = _HIGHEST if x > _HIGHEST else x
    exp_all(powers)
    for t in range(gate.shape[0]):
        for i in range(count):
            gate[t, first + i] = gate[t, first + i] / (np.float32(1) + powers[t * count + i]) * up[t, first + i]
