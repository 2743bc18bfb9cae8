"""Which implementation of an operation runs.

`cpu` (Numba) for float tensors on the CPU, `reference` for fp64 and where Numba is missing; on a device `triton` for
operations that have such a kernel, else `torch`. Neither reads back to the host, so that a step can be captured. The
environment variable KVLAB_OPS forces one of them; `triton` on the CPU needs Triton's interpreter, TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib.util
import os

import torch

from kvlab.ops import numba_support

BACKENDS = ("reference", "torch", "cpu", "triton")


def backend(x: torch.Tensor, triton: bool = False) -> str:
    """The name of the implementation for an operation on `x`.

    Args:
        triton: whether the operation has a Triton kernel; where not, "triton" becomes "torch".

    Raises:
        ValueError: KVLAB_OPS names an unknown backend, or "cpu" or "triton" where it cannot run.
    """
    forced = os.environ.get("KVLAB_OPS", "")
    if forced:
        name = _checked(forced, x)
    elif x.device.type == "cpu":
        name = "reference" if x.dtype == torch.float64 or not numba_support.available() else "cpu"
    else:
        name = "triton" if x.device.type == "cuda" and has_triton() and x.dtype != torch.float64 else "torch"
    return "torch" if name == "triton" and not triton else name


def has_triton() -> bool:
    """Whether triton is installed; it is not imported for that."""
    return importlib.util.find_spec("triton") is not None


def _checked(name: str, x: torch.Tensor) -> str:
    if name not in BACKENDS:
        raise ValueError(f"KVLAB_OPS {name!r}: must be one of {', '.join(BACKENDS)}")
    if name == "cpu" and (x.device.type != "cpu" or not numba_support.available()):
        raise ValueError(f"KVLAB_OPS 'cpu': needs Numba and tensors on the CPU, got {x.device}")
    if name == "triton" and x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("KVLAB_OPS 'triton': on the CPU needs TRITON_INTERPRET=1, set before triton is imported")
    # fp64 exists for exactness tests: only the plain implementations compute in it
    return "reference" if name in ("cpu", "triton") and x.dtype == torch.float64 else name


def cpu_kernels(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether both are fp32 on the CPU and the Numba kernels may run."""
    return x.dtype == weight.dtype == torch.float32 and backend(x) == "cpu"
