"""A guard against reads back to the host, on the CPU as on a device: what runs under it can be captured as a graph."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# operations whose result, or its shape, the host waits for
READS = {"_local_scalar_dense", "item", "nonzero", "nonzero_numpy", "is_nonzero", "equal", "masked_select", "bincount",
         "histc", "_unique2", "unique_dim", "unique_consecutive", "argwhere"}  # fmt: skip
# on the CPU these copy nothing that a dispatch mode could see
METHODS = ("tolist", "numpy", "cpu", "item", "__array__")


class NoHostReads(TorchDispatchMode):
    """Raises AssertionError where values of a tensor would decide what the host does next."""

    def __enter__(self):
        self._patch = pytest.MonkeyPatch()
        for name in METHODS:
            self._patch.setattr(torch.Tensor, name, _refusal(name))
        return super().__enter__()

    def __exit__(self, *raised):
        self._patch.undo()
        return super().__exit__(*raised)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if name in READS or (name.startswith("index") and any(map(_has_mask, args))):
            raise AssertionError(f"host read: {name}")
        return func(*args, **(kwargs or {}))


def _refusal(name):
    def refuse(*args, **kwargs):
        raise AssertionError(f"host read: {name}")

    return refuse


def _has_mask(argument):
    return isinstance(argument, (list, tuple)) and any(
        isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in argument
    )
