"""qkv, composed of the small operations."""

from __future__ import annotations

import torch

from kvlab.ops.linear import linear
from kvlab.ops.norm import rms_norm
from kvlab.ops.qkv import QKVWeights
from kvlab.ops.rope import rope


def qkv(
    x: torch.Tensor,
    weights: QKVWeights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    turn_keys: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kvlab.ops.qkv.qkv`."""
    w = weights
    rows = linear(rms_norm(x, w.norm, w.eps), w.weight, w.bias).view(x.shape[0], -1, w.head_dim)
    q, k, v = rows.split((w.num_heads, w.num_kv_heads, w.num_kv_heads), dim=1)
    if w.q_norm is not None and w.k_norm is not None:
        q, k = rms_norm(q, w.q_norm, w.eps), rms_norm(k, w.k_norm, w.eps)
    return rope(q, cos, sin, positions), rope(k, cos, sin, positions) if turn_keys else k, v
