"""Rotation of one head, for the fused CPU kernels."""

from __future__ import annotations

import numpy as np

from kvlab.ops.numba_support import kernel


@kernel()
def rotate_row(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    """Rotates x [D] in place by cos, sin [R / 2]."""
    half = cos.shape[0]
    for i in range(half):
        first, second = x[i], x[i + half]
        x[i] = first * cos[i] - second * sin[i]
        x[i + half] = second * cos[i] + first * sin[i]
