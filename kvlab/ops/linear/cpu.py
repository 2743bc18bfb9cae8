"""linear for few rows: every weight is read once, by all cores.

One row: traffic is the weights, N * K * 4 bytes. More rows: tiles of 2 rows by 4 weight rows keep 8 sums in
registers; the 4 weight rows stay in the first-level cache while all rows pass, so that the traffic stays the same.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from kvlab.ops.numba_support import kernel, launch

WEIGHT_ROWS = 4  # weight rows of a tile; callers loop over blocks of this many


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """See `kvlab.ops.linear.linear`; fp32 only."""
    y = torch.zeros((x.shape[0], weight.shape[0])) if residual is None else residual.clone()
    if bias is not None:
        y += bias
    launch(add_product, x.contiguous().numpy(), weight.numpy(), y.numpy())
    return y


@kernel()
def dot(a: np.ndarray, b: np.ndarray) -> np.float32:
    """Sum of a[k] * b[k]."""
    total = np.float32(0)
    for k in range(a.shape[0]):
        total += a[k] * b[k]
    return total


@kernel()
def tile_2x4(x0, x1, w0, w1, w2, w3):
    """The eight products of two rows with four weight rows."""
    a = b = c = d = e = f = g = h = np.float32(0)
    for k in range(x0.shape[0]):
        u, v, p, q, r, s = x0[k], x1[k], w0[k], w1[k], w2[k], w3[k]
        a += u * p
        b += u * q
        c += u * r
        d += u * s
        e += v * p
        f += v * q
        g += v * r
        h += v * s
    return a, b, c, d, e, f, g, h


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
def add_block(x: np.ndarray, w: np.ndarray, first: int, y: np.ndarray) -> None:
    """Adds x @ w[first : first + 4].T to those columns of y; fewer columns at the end of w."""
    rows, last = x.shape[0], min(first + WEIGHT_ROWS, w.shape[0])
    if rows == 1 or last - first < WEIGHT_ROWS:
        for n in range(first, last):
            for t in range(rows):
                y[t, n] += dot(x[t], w[n])
        return
    n = first
    w0, w1, w2, w3 = w[n], w[n + 1], w[n + 2], w[n + 3]
    for t in range(0, rows - 1, 2):
        a, b, c, d, e, f, g, h = tile_2x4(x[t], x[t + 1], w0, w1, w2, w3)
        y[t, n] += a
        y[t, n + 1] += b
        y[t, n + 2] += c
        y[t, n + 3] += d
        y[t + 1, n] += e
        y[t + 1, n + 1] += f
        y[t + 1, n + 2] += g
        y[t + 1, n + 3] += h
    if rows % 2:
        t = rows - 1
        a, b, c, d = tile_1x4(x[t], w0, w1, w2, w3)
        y[t, n] += a
        y[t, n + 1] += b
        y[t, n + 2] += c
        y[t, n + 3] += d


@kernel(parallel=True)
def add_product(x: np.ndarray, w: np.ndarray, y: np.ndarray) -> None:
    """y += x @ w.T with x [T, K], w [N, K], y [T, N]."""
    for block in numba.prange((w.shape[0] + WEIGHT_ROWS - 1) // WEIGHT_ROWS):
        add_block(x, w, block * WEIGHT_ROWS, y)
