"""Products with a weight matrix."""

from __future__ import annotations

import torch

from kvlab.ops.dispatch import few_rows

# rows up to which reading the weights once on all cores beats torch's product, which splits few rows badly;
# measured on one busy core: torch catches up between 16 and 32 rows (to be repeated on a quiet machine)
MAX_ROWS = 16


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
