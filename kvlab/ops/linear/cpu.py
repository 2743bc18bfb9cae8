"""linear on the CPU: packed rows times weight rows, by all cores.

Few rows: the cores share the weight's rows, so that each weight is read once: traffic N * K * 4 bytes. Many rows: each
core takes rows of its own through the whole weight, as many as fit the second-level cache when packed; the cores
never wait for each other, and weights come from the shared cache.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from kvlab.ops.linear import APART
from kvlab.ops.linear.cpu_tile import LANES, MAX_VECTORS, SUMS, add_tiles, pack, put_tiles
from kvlab.ops.numba_support import kernel, launch, num_threads

WEIGHT_ROWS = SUMS  # callers loop over blocks of this many
GROUP = MAX_VECTORS * LANES  # rows that a tile takes
CHUNK = 96  # rows that a core takes through a weight: at K = 576 they fill 216 KiB


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """See `kvlab.ops.linear.linear`; fp32 only."""
    y = torch.zeros((x.shape[0], weight.shape[0])) if residual is None else residual.clone()
    if bias is not None:
        y += bias
    arrays = (x.contiguous().numpy(), weight.contiguous().numpy(), y.numpy())
    if len(x) < APART:
        launch(add_product, *arrays)
    else:
        launch(_add_apart, *arrays, num_threads())
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
def _dot_lane(packed: np.ndarray, lane: int, lanes: int, weight: np.ndarray) -> np.float32:
    """The product of one row of a packed group with one weight row."""
    return dot(packed, weight) if lanes == 1 else dot(packed[lane::lanes], weight)


@kernel()
def add_block(packed: np.ndarray, w: np.ndarray, first: int, y: np.ndarray) -> None:
    """Adds x @ w[first : first + WEIGHT_ROWS].T to those columns of y [T, N], x packed; fewer columns at the end of w."""
    lanes, last = packed.shape[1] // w.shape[1], min(first + WEIGHT_ROWS, w.shape[0])
    if lanes > 1 and last - first == WEIGHT_ROWS:
        add_tiles(packed, w, first, y)
        return
    for t in range(y.shape[0]):
        for n in range(first, last):
            y[t, n] += _dot_lane(packed[t // lanes], t % lanes, lanes, w[n])


@kernel()
def put_block(packed: np.ndarray, w: np.ndarray, first: int, bias: np.ndarray, out: np.ndarray) -> None:
    """The same products plus `bias` [N], where there is one, as packed rows: to those columns of out [groups, N * lanes]."""
    lanes, last = packed.shape[1] // w.shape[1], min(first + WEIGHT_ROWS, w.shape[0])
    if lanes > 1 and last - first == WEIGHT_ROWS:
        put_tiles(packed, w, first, out)
    else:
        for i in range(packed.shape[0]):
            for lane in range(lanes):
                for n in range(first, last):
                    out[i, n * lanes + lane] = _dot_lane(packed[i], lane, lanes, w[n])
    if bias.shape[0]:
        for i in range(packed.shape[0]):
            for k in range(first * lanes, last * lanes):
                out[i, k] += bias[k // lanes]


@kernel(parallel=True)
def add_product(x: np.ndarray, w: np.ndarray, y: np.ndarray) -> None:
    """y += x @ w.T with x [T, K], w [N, K], y [T, N]; the cores share the rows of w."""
    packed = pack(x)
    for block in numba.prange((w.shape[0] + WEIGHT_ROWS - 1) // WEIGHT_ROWS):
        add_block(packed, w, block * WEIGHT_ROWS, y)


@kernel()
def chunk_rows(rows: int, threads: int) -> int:
    """Rows of a chunk: about CHUNK or a thread's share, whole groups, and never one row over for the last chunk, whose sum
    would run in another order.
    """
    share = (rows + threads - 1) // threads
    size = min(CHUNK, (share + GROUP - 1) // GROUP * GROUP)
    while rows % size == 1:
        size += GROUP
    return size


@kernel()
def add_all(x: np.ndarray, w: np.ndarray, y: np.ndarray) -> None:
    """y += x @ w.T by one core."""
    packed = pack(x)
    for first in range(0, w.shape[0], WEIGHT_ROWS):
        add_block(packed, w, first, y)


@kernel(parallel=True)
def _add_apart(x, w, y, threads) -> None:
    size = chunk_rows(x.shape[0], threads)
    for chunk in numba.prange((x.shape[0] + size - 1) // size):
        first = chunk * size
        add_all(x[first : first + size], w, y[first : first + size])
