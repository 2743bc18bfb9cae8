"""Products with a weight matrix; adapters may change those of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from kvlab.ops.dispatch import few_rows

# rows up to which the CPU kernels beat torch's product. With weights that come from memory, two Zen 3 cores do about 105
# GFLOP/s from 16 rows on, torch 30 at 16, 40 at 64 and 95 from 128 on; beyond 256 rows whole steps were slower
MAX_ROWS = 256


Change = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Called with (x, weight, product), it adds to the product in place."""

_change: ContextVar[Change | None] = ContextVar("change", default=None)


@contextmanager
def changed(change: Change) -> Iterator[None]:
    """While it lasts, every product of this thread is given to `change` before it is returned."""
    token = _change.set(change)
    try:
        yield
    finally:
        _change.reset(token)


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
    product = _product(x, weight, bias, residual)
    change = _change.get()
    if change is not None:
        change(x, weight, product)
    return product


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    if few_rows(x, MAX_ROWS) and weight.dtype == torch.float32:
        from kvlab.ops.linear import cpu

        return cpu.linear(x, weight, bias, residual)
    from kvlab.ops.linear import reference

    return reference.linear(x, weight, bias, residual)
