"""qkv on the CPU, one launch. Traffic for few rows: the projection's weights, once."""

from __future__ import annotations

import numba
import numpy as np
import torch

from kvlab.ops.linear import APART
from kvlab.ops.linear.cpu import WEIGHT_ROWS, add_block, chunk_rows
from kvlab.ops.linear.cpu_tile import pack
from kvlab.ops.norm.cpu import norm_row
from kvlab.ops.numba_support import kernel, launch, num_threads
from kvlab.ops.qkv import QKVWeights
from kvlab.ops.rope.cpu import rotate_row

_NONE = np.empty(0, np.float32)  # stands for a bias or norm that is not there


def qkv(
    x: torch.Tensor, weights: QKVWeights, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kvlab.ops.qkv.qkv`; fp32 only."""
    w = weights
    heads = (w.num_heads, w.num_kv_heads)
    out = torch.empty((x.shape[0], w.weight.shape[0]), dtype=torch.float32)
    vectors = (w.norm.numpy(), _array(w.bias), _array(w.q_norm), _array(w.k_norm))
    tables = (cos.numpy(), sin.numpy(), positions.numpy())
    args = (x.contiguous().numpy(), w.weight.numpy(), vectors, tables, heads, float(w.eps), out.numpy())
    if len(x) < APART:
        launch(_qkv, *args)
    else:
        launch(_qkv_apart, *args, num_threads())
    rows = out.view(x.shape[0], -1, w.head_dim)
    q, k, v = rows.split((w.num_heads, w.num_kv_heads, w.num_kv_heads), dim=1)
    return q, k, v


def _array(tensor: torch.Tensor | None) -> np.ndarray:
    return _NONE if tensor is None else tensor.numpy()


@kernel(parallel=True)
def _qkv(x, weight, vectors, tables, heads, eps, out) -> None:
    """The cores share the rows of the weight."""
    packed = _start(x, vectors, eps, out)
    for block in numba.prange((weight.shape[0] + WEIGHT_ROWS - 1) // WEIGHT_ROWS):
        add_block(packed, weight, block * WEIGHT_ROWS, out)
    _rotate(out, vectors, tables, heads, eps)


@kernel(parallel=True)
def _qkv_apart(x, weight, vectors, tables, heads, eps, out, threads) -> None:
    """The cores take rows of x of their own."""
    cos, sin, positions = tables
    size = chunk_rows(x.shape[0], threads)
    for chunk in numba.prange((x.shape[0] + size - 1) // size):
        first, last = chunk * size, min((chunk + 1) * size, x.shape[0])
        packed = _start(x[first:last], vectors, eps, out[first:last])
        for column in range(0, weight.shape[0], WEIGHT_ROWS):
            add_block(packed, weight, column, out[first:last])
        _rotate(out[first:last], vectors, (cos, sin, positions[first:last]), heads, eps)


@kernel()
def _start(x, vectors, eps, out):
    """The normed rows of x, packed; `out` becomes the bias."""
    norm, bias, _, _ = vectors
    normed = np.empty_like(x)
    for t in range(x.shape[0]):
        norm_row(x[t], norm, eps, normed[t])
        if bias.shape[0]:
            out[t] = bias
        else:
            out[t] = 0
    return pack(normed)


@kernel()
def _rotate(out, vectors, tables, heads, eps) -> None:
    """Norms and rotates the query and key heads of each row of `out`, in place."""
    _, _, q_norm, k_norm = vectors
    cos, sin, positions = tables
    num_heads, num_kv_heads = heads
    head_dim = out.shape[1] // (num_heads + 2 * num_kv_heads)
    for t in range(out.shape[0]):
        for h in range(num_heads + num_kv_heads):
            row = out[t, h * head_dim : (h + 1) * head_dim]
            if q_norm.shape[0]:
                norm_row(row, q_norm if h < num_heads else k_norm, eps, row)
            rotate_row(row, cos[positions[t]], sin[positions[t]])
