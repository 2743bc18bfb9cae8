"""Exponentials and tanh over a row of scores, written so that LLVM vectorises them."""

from __future__ import annotations

import numpy as np

from kvlab.ops.numba_support import kernel

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87.0)  # exp of less would need subnormals; it counts as 1.6e-38
# minimax polynomial of exp on [-ln2 / 2, ln2 / 2]; Source: Cephes expf. Relative error of the whole: 2e-7.
_C0, _C1, _C2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C3, _C4, _C5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@kernel()
def exp_row(row):
    """(largest, sum) of a row of scores, which becomes exp(row - largest) in place. NaN stays NaN.

    Args:
        row: fp32 [n], n >= 1.
    """
    largest = row[0]
    for i in range(1, row.shape[0]):
        largest = row[i] if row[i] > largest else largest
    total = np.float32(0)
    for i in range(row.shape[0]):
        row[i] -= largest
    exp_all(row)
    for i in range(row.shape[0]):
        total += row[i]
    return largest, total


@kernel()
def exp_all(row) -> None:
    """row = exp(row) in place, for values up to 88; NaN stays NaN."""
    for i in range(row.shape[0]):
        x = _LOWEST if row[i] < _LOWEST else row[i]  # not max(): that would turn NaN into a number
        n = np.floor(x * _LOG2_E + np.float32(0.5))
        x = x - n * _LN2_HIGH - n * _LN2_LOW
        poly = ((((_C0 * x + _C1) * x + _C2) * x + _C3) * x + _C4) * x + _C5
        power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
        row[i] = (poly * x * x + x + np.float32(1)) * power


@kernel()
def softcap_row(row, cap) -> None:
    """row = cap * tanh(row / cap) in place."""
    for i in range(row.shape[0]):
        row[i] = cap * np.tanh(row[i] / cap)
