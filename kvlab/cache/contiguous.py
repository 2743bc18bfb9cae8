"""The allocator before paging: one unbroken region per request, reserved when it arrives. Bookkeeping only.

A region must hold the whole request, so its size is a guess about a length that nobody knows yet. Three things are
lost: slots kept for tokens still to come, slots that no token will ever take, and gaps that are free but too short.

Source: Kwon et al., arXiv:2309.06180, section 3.1, for the three kinds and the rules "max", "pow2" and "exact".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

RULES = {
    "max": "the longest request allowed",
    "pow2": "the prompt and the power of two above the output",
    "exact": "exactly what it will need, which no server can know",
}


def reserved_tokens(rule: str, prompt: int, output: int, longest: int) -> int:
    """Slots that `rule` reserves for a request of `prompt` and, in the end, `output` tokens.

    Raises:
        ValueError: an unknown rule, or a request longer than `longest`.
    """
    if rule not in RULES:
        raise ValueError(f"rule {rule!r}: must be one of {', '.join(RULES)}")
    if prompt + output > longest:
        raise ValueError(f"request of {prompt + output} tokens: must be at most {longest}")
    if rule == "max":
        return longest
    room = output if rule == "exact" else 1 << (output - 1).bit_length()
    return min(longest, prompt + room)


class ContiguousPool:
    """Slots 0 .. capacity - 1; each request holds one region of them, the first gap that is long enough.

    Raises:
        ValueError: a capacity below 1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity {capacity}: must be at least 1 slot")
        self.capacity = capacity
        self.regions: dict[str, range] = {}

    def gaps(self) -> Iterator[range]:
        """The free slots between regions, lowest first."""
        start = 0
        for region in sorted(self.regions.values(), key=lambda r: r.start):
            if region.start > start:
                yield range(start, region.start)
            start = region.stop
        if start < self.capacity:
            yield range(start, self.capacity)

    def reserve(self, request_id: str, size: int) -> range | None:
        """The request's region; None when no gap is long enough, although all gaps together may be.

        Raises:
            ValueError: the request has a region, or the size is not positive.
        """
        if request_id in self.regions or size < 1:
            raise ValueError(f"request {request_id}, size {size}: must be a new request and at least 1 slot")
        for gap in self.gaps():
            if len(gap) >= size:
                self.regions[request_id] = range(gap.start, gap.start + size)
                return self.regions[request_id]
        return None

    def free(self, request_id: str) -> int:
        """Slots given back by the request."""
        return len(self.regions.pop(request_id))

    @property
    def num_free(self) -> int:
        """Slots in gaps."""
        return self.capacity - sum(map(len, self.regions.values()))

    @property
    def largest_gap(self) -> int:
        """Slots of the longest gap."""
        return max(map(len, self.gaps()), default=0)


@dataclass(frozen=True)
class SlotUse:
    """What slots of a pool are for, at one moment. The sum is the capacity.

    Attributes:
        used: tokens that are there.
        later: kept for tokens of running requests that are still to come.
        never: kept, and no token will come: internal fragmentation.
        gaps: free and together enough for the next request, but no single place is: external fragmentation.
        short: free, and in all too little for the next request (or nobody waits).
    """

    used: int = 0
    later: int = 0
    never: int = 0
    gaps: int = 0
    short: int = 0


def slot_use(pool: ContiguousPool, now: dict[str, int], final: dict[str, int], next_size: int) -> SlotUse:
    """What the slots of `pool` are for.

    Args:
        now: tokens that each request has. final: tokens that it will have when it ends.
        next_size: slots that the next waiting request asks for; 0 when nobody waits.
    """
    used = sum(now[name] for name in pool.regions)
    later = sum(final[name] - now[name] for name in pool.regions)
    never = sum(len(region) - final[name] for name, region in pool.regions.items())
    split = 0 < next_size <= pool.num_free and pool.largest_gap < next_size
    return SlotUse(used, later, never, *((pool.num_free, 0) if split else (0, pool.num_free)))
