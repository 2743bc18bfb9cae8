"""From the residual stream to rotated queries, keys and values: one call, because at one row each call counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlab.ops.dispatch import cpu_kernels


@dataclass(frozen=True, eq=False)
class QKVWeights:
    """Weights of the first half of an attention layer.

    Attributes:
        norm: [H], RMS norm before the projection.
        weight: [(Hq + 2 Hkv) * D, H], rows of q, then k, then v.
        bias: [(Hq + 2 Hkv) * D] or None.
        q_norm, k_norm: [D] RMS norms of each head before rotation, or None.
        eps: of all three norms.
        num_heads, num_kv_heads, head_dim: Hq, Hkv, D.
    """

    norm: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int


def qkv(
    x: torch.Tensor,
    weights: QKVWeights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    turn_keys: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) of the residual stream `x` [T, H]: norm, projection, rotation.

    Args:
        cos, sin, positions: as in `kvlab.ops.rope.rope`; tables in x's dtype.
        turn_keys: False leaves the rotation of keys to the cache write (`kvlab.ops.write_kv.turns_keys`).
    """
    if turn_keys and cpu_kernels(x, weights.weight):
        from kvlab.ops.qkv import cpu

        return cpu.qkv(x, weights, cos, sin, positions)
    from kvlab.ops.qkv import reference

    return reference.qkv(x, weights, cos, sin, positions, turn_keys)
