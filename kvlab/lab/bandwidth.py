"""How fast this machine reads memory that no cache holds."""

from __future__ import annotations

import statistics
import time

import torch

from kvlab.ops import numba_support


def read_bandwidth(n_bytes: int, repeats: int = 7) -> float:
    """Bytes per second of reading `n_bytes` once on all cores, the median of `repeats`.

    `n_bytes` should be several times the last-level cache.
    """
    data = torch.ones(n_bytes // 4)
    read = data.sum
    if numba_support.available():
        from kvlab.lab.bandwidth_kernel import total

        array = data.numpy()

        def read() -> None:
            numba_support.launch(total, array)

    read()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        read()
        times.append(time.perf_counter() - start)
    return data.numel() * 4 / statistics.median(times)
