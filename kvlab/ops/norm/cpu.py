"""RMS norm of rows, for the fused CPU kernels."""

from __future__ import annotations

import numpy as np

from kvlab.ops.numba_support import kernel


@kernel()
def norm_row(x: np.ndarray, weight: np.ndarray, eps: float, y: np.ndarray) -> None:
    """y = x / sqrt(mean(x^2) + eps) * weight for one row; `y` may be `x`."""
    total = np.float32(0)
    for k in range(x.shape[0]):
        total += x[k] * x[k]
    factor = np.float32(1) / np.sqrt(total / np.float32(x.shape[0]) + np.float32(eps))
    for k in range(x.shape[0]):
        y[k] = weight[k] * (x[k] * factor)
