"""Which implementation of an operation runs.

`cpu` (Numba) for float tensors on the CPU, `reference` for fp64 and where Numba is missing, `torch` (no host
reads, so that it can be captured) on a device. The environment variable KVLAB_OPS forces one of them.
"""

from __future__ import annotations

import os

import torch

from kvlab.ops import numba_support

BACKENDS = ("reference", "torch", "cpu")


def backend(x: torch.Tensor) -> str:
    """The name of the implementation for an operation on `x`.

    Raises:
        ValueError: KVLAB_OPS names an unknown backend, or "cpu" where it cannot run.
    """
    forced = os.environ.get("KVLAB_OPS", "")
    if forced:
        return _checked(forced, x)
    if x.device.type != "cpu":
        return "torch"
    if x.dtype == torch.float64 or not numba_support.available():
        return "reference"
    return "cpu"


def _checked(name: str, x: torch.Tensor) -> str:
    if name not in BACKENDS:
        raise ValueError(f"KVLAB_OPS {name!r}: must be one of {', '.join(BACKENDS)}")
    if name == "cpu" and (x.device.type != "cpu" or not numba_support.available()):
        raise ValueError(f"KVLAB_OPS 'cpu': needs Numba and tensors on the CPU, got {x.device}")
    # fp64 exists for exactness tests: only the plain implementations compute in it
    return "reference" if name == "cpu" and x.dtype == torch.float64 else name


def few_rows(x: torch.Tensor, limit: int) -> bool:
    """Whether `x` [T, K] is fp32 on the CPU with at most `limit` rows and the Numba kernels may run."""
    return x.dtype == torch.float32 and x.shape[0] <= limit and backend(x) == "cpu"
