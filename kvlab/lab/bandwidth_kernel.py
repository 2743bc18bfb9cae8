"""The sum of an array on all cores: one load and one addition per value, so memory is all that it waits for."""

from __future__ import annotations

import numba
import numpy as np

from kvlab.ops.numba_support import kernel

BLOCK = 4096  # values that one iteration sums


@kernel(parallel=True)
def total(array: np.ndarray) -> np.float32:
    """The sum of a flat fp32 array; what is left of the last block is not read."""
    sums = np.zeros(array.shape[0] // BLOCK, np.float32)
    for i in numba.prange(sums.shape[0]):
        part = array[i * BLOCK : (i + 1) * BLOCK]
        value = np.float32(0)
        for j in range(BLOCK):
            value += part[j]
        sums[i] = value
    return sums.sum()
