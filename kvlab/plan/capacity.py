"""From bytes per sequence to how many fit: exact integers, rounded against the reader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

TOKEN_LIMIT = 2**34
"""Where `tokens_that_fit` stops looking: a cache that stops growing fits any number of tokens."""


@dataclass(frozen=True)
class MemoryBudget:
    """The memory of one GPU, split as the planner splits it.

    Attributes:
        memory_bytes: what the device has.
        usable_bytes: memory_bytes x gpu_util, rounded down.
        weights_bytes: of this GPU's share of the weights.
        reserve_bytes: workspace: activations, graphs, the runtime.
    """

    memory_bytes: int
    usable_bytes: int
    weights_bytes: int
    reserve_bytes: int

    @property
    def free_bytes(self) -> int:
        """What is left for the cache; negative when the weights do not fit."""
        return self.usable_bytes - self.weights_bytes - self.reserve_bytes


def usable_bytes(memory_bytes: int, gpu_util: float) -> int:
    """`memory_bytes` x `gpu_util` rounded down, with the decimal fraction taken exactly.

    Raises:
        ValueError: gpu_util outside (0, 1].
    """
    if not 0 < gpu_util <= 1:
        raise ValueError(f"gpu_util {gpu_util}: must be above 0 and at most 1")
    return int(memory_bytes * Fraction(str(gpu_util)))


def max_concurrent(free_bytes: int, sequence_bytes: int, pool_overhead: int = 0) -> int:
    """Whole sequences of `sequence_bytes` that fit `free_bytes` once the pool's own pages are taken off."""
    left = free_bytes - pool_overhead
    return max(0, left // sequence_bytes) if sequence_bytes else 0


def tokens_that_fit(bytes_at: Callable[[int], int], budget: int, limit: int = TOKEN_LIMIT) -> int:
    """The longest length whose `bytes_at(length)` is at most `budget`, up to `limit`; 0 when none fits.

    `bytes_at` must not fall as the length grows. It is asked, never treated as a rate: windows and states make
    bytes a function of length that no single number stands for.
    """
    if budget < 0 or bytes_at(1) > budget:
        return 0
    low, high = 1, 2
    while high <= limit and bytes_at(high) <= budget:
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if bytes_at(middle) <= budget:
            low = middle
        else:
            high = middle
    return low
