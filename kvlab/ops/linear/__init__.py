"""Products with a weight matrix."""

from __future__ import annotations

import torch

from kvlab.ops.dispatch import few_rows

# rows up to which the CPU kernels beat torch's product. With weights that come from memory, two Zen 3 cores do about 105
# GFLOP/s from 16 rows on, torch 30 at 16, 40 at 64 and 95 from 128 on; beyond 256 rows whole steps were slower
MAX_ROWS = 256


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias + residual`, [T, N].

    Args:
        x: [T, K].
        weight: [N, K].
        bias: [N].
        residual: [T, N].
    """
    if few_rows(x, MAX_ROWS) and weight.dtype == torch.float32:
        from kvlab.ops.linear import cpu

        return cpu.linear(x, weight, bias, residual)
    from kvlab.ops.linear import reference

    return reference.linear(x, weight, bias, residual)
