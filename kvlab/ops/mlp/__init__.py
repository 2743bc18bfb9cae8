"""The second half of a decoder layer: attention output, residual, SwiGLU feed-forward, residual."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlab.ops.dispatch import cpu_kernels


@dataclass(frozen=True, eq=False)
class MLPWeights:
    """Weights of a layer after attention.

    Attributes:
        norm: [H], RMS norm before the feed-forward part.
        gate_up: [2F, H], rows of gate, then up.
        down: [H, F].
        eps: of the norm.
        gate_up_bias, down_bias: [2F] and [H], or None.
    """

    norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    eps: float
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


def mlp(x: torch.Tensor, weights: MLPWeights) -> torch.Tensor:
    """`x + down(silu(gate(n)) * up(n))` with n = rms_norm(x), [T, H]."""
    if cpu_kernels(x, weights.down):
        from kvlab.ops.mlp import cpu

        return cpu.mlp(x, weights)
    from kvlab.ops.mlp import reference

    return reference.mlp(x, weights)
