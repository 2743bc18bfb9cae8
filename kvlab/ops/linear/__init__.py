"""Products with a weight matrix; adapters may change those of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from kvlab.ops.dispatch import cpu_kernels

# rows from which on each core of a CPU takes rows of its own through a weight instead of some of the weight's rows
APART = 192


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
    if cpu_kernels(x, weight):
        from kvlab.ops.linear import cpu

        return cpu.linear(x, weight, bias, residual)
    from kvlab.ops.linear import reference

    return reference.linear(x, weight, bias, residual)
