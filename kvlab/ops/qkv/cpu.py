"""qkv for few rows, one launch. Traffic: the projection's weights, once."""

from __future__ import annotations

import numba
import numpy as np
import torch

from kvlab.ops.linear.cpu import WEIGHT_ROWS, add_block, prepare
from kvlab.ops.norm.cpu import norm_row
from kvlab.ops.numba_support import kernel, launch
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
    launch(_qkv, x.contiguous().numpy(), w.weight.numpy(), vectors, tables, heads, float(w.eps), out.numpy())
    rows = out.view(x.shape[0], -1, w.head_dim)
    q, k, v = rows.split((w.num_heads, w.num_kv_heads, w.num_kv_heads), dim=1)
    return q, k, v


def _array(tensor: torch.Tensor | None) -> np.ndarray:
    return _NONE if tensor is None else tensor.numpy()


@kernel(parallel=True)
def _qkv(x, weight, vectors, tables, heads, eps, out) -> None:
    norm, bias, q_norm, k_norm = vectors
    normed = np.empty_like(x)
    for t in range(x.shape[0]):
        norm_row(x[t], norm, eps, normed[t])
        if bias.shape[0]:
            out[t] = bias
        else:
            out[t] = 0
    packed = prepare(normed)
    for block in numba.prange((weight.shape[0] + WEIGHT_ROWS - 1) // WEIGHT_ROWS):
        add_block(normed, packed, weight, block * WEIGHT_ROWS, out)
    _rotate(out, q_norm, k_norm, tables, heads, eps)


@kernel()
def _rotate(out, q_norm, k_norm, tables, heads, eps) -> None:
    """Norms and rotates the query and key heads of each row of `out`, in place."""
    cos, sin, positions = tables
    num_heads, num_kv_heads = heads
    head_dim = out.shape[1] // (num_heads + 2 * num_kv_heads)
    for t in range(out.shape[0]):
        for h in range(num_heads + num_kv_heads):
            row = out[t, h * head_dim : (h + 1) * head_dim]
            if q_norm.shape[0]:
                norm_row(row, q_norm if h < num_heads else k_norm, eps, row)
            rotate_row(row, cos[positions[t]], sin[positions[t]])
