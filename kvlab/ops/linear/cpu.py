"""linear for few rows: every weight is read once, by all cores.

One row: traffic is the weights, N * K * 4 bytes. More rows: `cpu_tile`, the same traffic as long as the packed rows
and a block of weight rows fit the second-level cache.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from kvlab.ops.linear.cpu_tile import SUMS, add_tiles, pack
from kvlab.ops.numba_support import kernel, launch

WEIGHT_ROWS = SUMS  # callers loop over blocks of this many


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """See `kvlab.ops.linear.linear`; fp32 only."""
    y = torch.zeros((x.shape[0], weight.shape[0])) if residual is None else residual.clone()
    if bias is not None:
        y += bias
    launch(add_product, x.contiguous().numpy(), weight.contiguous().numpy(), y.numpy())
    return y


@kernel()
def dot(a: np.ndarray, b: np.ndarray) -> np.float32:
    """Sum of a[k] * b[k]."""
    total = np.float32(0)
    for k in range(a.shape[0]):
        total += a[k] * b[k]
    return total


@kernel()
def tile_1x4(x0, w0, w1, w2, w3):
    """The four products of a row with four weight rows."""
    a = b = c = d = np.float32(0)
    for k in range(x0.shape[0]):
        u = x0[k]
        a += u * w0[k]
        b += u * w1[k]
        c += u * w2[k]
        d += u * w3[k]
    return a, b, c, d


@kernel()
def prepare(x: np.ndarray) -> np.ndarray:
    """What `add_block` wants beside x: its rows packed; nothing for one row."""
    return pack(x if x.shape[0] > 1 else x[:0])


@kernel()
def add_block(x: np.ndarray, packed: np.ndarray, w: np.ndarray, first: int, y: np.ndarray) -> None:
    """Adds x @ w[first : first + WEIGHT_ROWS].T to those columns of y; fewer columns at the end of w."""
    last = min(first + WEIGHT_ROWS, w.shape[0])
    if packed.shape[0] and last - first == WEIGHT_ROWS:
        add_tiles(packed, w, first, y)
        return
    for n in range(first, last):
        for t in range(x.shape[0]):
            y[t, n] += dot(x[t], w[n])


@kernel(parallel=True)
def add_product(x: np.ndarray, w: np.ndarray, y: np.ndarray) -> None:
    """y += x @ w.T with x [T, K], w [N, K], y [T, N]."""
    packed = prepare(x)
    for block in numba.prange((w.shape[0] + WEIGHT_ROWS - 1) // WEIGHT_ROWS):
        add_block(x, packed, w, block * WEIGHT_ROWS, y)
