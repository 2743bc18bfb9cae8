"""mlp on the CPU, one launch. Traffic for few rows: the three weight matrices, once.

What lies between the products stays packed as the products want it (`kvlab.ops.linear.cpu_tile`), in the cache.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from kvlab.ops.attention.cpu_math import exp_all
from kvlab.ops.linear import APART
from kvlab.ops.linear.cpu import WEIGHT_ROWS, add_block, chunk_rows, put_block
from kvlab.ops.linear.cpu_tile import pack
from kvlab.ops.mlp import MLPWeights
from kvlab.ops.norm.cpu import norm_row
from kvlab.ops.numba_support import kernel, launch, num_threads

_NONE = np.empty(0, np.float32)
_HIGHEST = np.float32(88)  # exp of more is beyond fp32


def mlp(x: torch.Tensor, weights: MLPWeights) -> torch.Tensor:
    """See `kvlab.ops.mlp.mlp`; fp32 only."""
    w = weights
    y = x.clone(memory_format=torch.contiguous_format)
    norm, biases = (
        (w.norm.numpy(), float(w.eps)),
        [_NONE if b is None else b.numpy() for b in (w.gate_up_bias, w.down_bias)],
    )
    products = (w.gate_up.numpy(), w.down.numpy(), *biases)
    if len(x) < APART:
        launch(_mlp, y.numpy(), norm, products)
    else:
        launch(_mlp_apart, y.numpy(), norm, products, num_threads())
    return y


@kernel(parallel=True)
def _mlp(y, norm, products) -> None:
    """The cores share the rows of the weights."""
    packed, gate = _start(y, norm, products)
    down = products[1]
    for block in numba.prange((down.shape[1] + WEIGHT_ROWS - 1) // WEIGHT_ROWS):
        gate_block(packed, products[0], products[2], block * WEIGHT_ROWS, gate)
    for block in numba.prange((down.shape[0] + WEIGHT_ROWS - 1) // WEIGHT_ROWS):
        add_block(gate, down, block * WEIGHT_ROWS, y)


@kernel(parallel=True)
def _mlp_apart(y, norm, products, threads) -> None:
    """The cores take rows of y of their own."""
    size = chunk_rows(y.shape[0], threads)
    for chunk in numba.prange((y.shape[0] + size - 1) // size):
        _mlp_rows(y[chunk * size : (chunk + 1) * size], norm, products)


@kernel()
def _mlp_rows(y, norm, products) -> None:
    packed, gate = _start(y, norm, products)
    down = products[1]
    for first in range(0, down.shape[1], WEIGHT_ROWS):
        gate_block(packed, products[0], products[2], first, gate)
    for first in range(0, down.shape[0], WEIGHT_ROWS):
        add_block(gate, down, first, y)


@kernel()
def _start(y, norm, products):
    """(the normed rows, packed; room for what lies between the products); y gets the bias of `down`."""
    _, down, _, down_bias = products
    weight, eps = norm
    normed = np.empty_like(y)
    for t in range(y.shape[0]):
        norm_row(y[t], weight, eps, normed[t])
        if down_bias.shape[0]:
            y[t] += down_bias
    packed = pack(normed)
    lanes = packed.shape[1] // y.shape[1]
    return packed, np.empty((packed.shape[0], lanes * down.shape[1]), np.float32)


@kernel()
def gate_block(packed, gate_up, bias, first, gate) -> None:
    """gate = silu(gate) * up for one block of weight rows of each half; packed rows in, packed rows out."""
    width = gate_up.shape[0] // 2
    lanes, last = gate.shape[1] // width, min(first + WEIGHT_ROWS, width)
    up = np.empty((gate.shape[0], (last - first) * lanes), np.float32)
    put_block(packed, gate_up[:width], first, bias[: bias.shape[0] // 2], gate)
    own = bias[width + first : width + last] if bias.shape[0] else bias
    put_block(packed, gate_up[width + first : width + last], 0, own, up)
    for i in range(gate.shape[0]):
        _silu_mul(gate[i, first * lanes : last * lanes], up[i])


@kernel()
def _silu_mul(gate, up) -> None:
    """gate = silu(gate) * up, in place."""
    powers = np.empty(gate.shape[0], np.float32)
    for i in range(gate.shape[0]):
        powers[i] = _HIGHEST if -gate[i] > _HIGHEST else -gate[i]
    exp_all(powers)
    for i in range(gate.shape[0]):
        gate[i] = gate[i] / (np.float32(1) + powers[i]) * up[i]
