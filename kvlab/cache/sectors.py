"""Pages of one group cut from sectors that all groups share.

Invariants:
    page p of a group lies in sector p // pages_per_unit; sector 0 is the null sector, so no page in it is given out;
    a sector is held by one group at a time, as long as one of its pages is;
    a new sector is taken only when no held one has a free page, so one sequence alone never takes more sectors
    than its pages fill.

Source: transformers 5.24 generation/continuous_batching (sectors); it differs by taking pages one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

from kvlab.cache.pool import NULL_BLOCK, BlockPool


class SectorPages:
    """The page ids of one group; the interface is `BlockPool`'s.

    Args:
        units: the pool of sectors, shared with other groups.
        pages_per_unit: pages that this group cuts a sector into.
    """

    def __init__(self, units: BlockPool, pages_per_unit: int) -> None:
        self.units, self.pages_per_unit = units, pages_per_unit
        self.num_blocks = units.num_blocks * pages_per_unit
        self.references = array("i", bytes(4 * self.num_blocks))
        self.num_held = 0
        self.on_free: Callable[[list[int]], None] | None = None
        # free pages of held sectors, the sector that opened first at the front
        self._open: dict[int, list[int]] = {}

    @property
    def num_open(self) -> int:
        """Free pages in sectors that this group holds: no other group can have them."""
        return sum(map(len, self._open.values()))

    @property
    def num_free(self) -> int:
        """Pages this group could get if no other group asked."""
        return self.num_open + self.units.num_free * self.pages_per_unit

    def allocate(self, count: int) -> list[int]:
        """`count` free pages, each with one reference: from held sectors first.

        Raises:
            ValueError: fewer than `count` pages can be had; none is taken then.
        """
        if count > self.num_free:
            raise ValueError(f"count {count}: only {self.num_free} pages are free")
        pages = []
        while len(pages) < count:
            if not self._open:
                [sector] = self.units.allocate(1)
                first = sector * self.pages_per_unit
                self._open[sector] = list(range(first + self.pages_per_unit - 1, first - 1, -1))
            sector, free = next(iter(self._open.items()))
            page = free.pop()
            if not free:
                del self._open[sector]
            self.references[page] = 1
            pages.append(page)
        self.num_held += count
        return pages

    def free(self, blocks: Sequence[int]) -> None:
        """Drops one reference per listed page; null pages are skipped. A sector without held pages goes back."""
        released = []
        for page in reversed(blocks):
            if page == NULL_BLOCK:
                continue
            assert self.references[page] > 0, f"page {page} is freed more often than it was taken"
            self.references[page] -= 1
            if not self.references[page]:
                self._open.setdefault(page // self.pages_per_unit, []).append(page)
                released.append(page)
        self.num_held -= len(released)
        for sector in dict.fromkeys(page // self.pages_per_unit for page in released):
            if len(self._open[sector]) == self.pages_per_unit:
                del self._open[sector]
                self.units.free([sector])
        if released and self.on_free:
            self.on_free(released)

    def free_blocks(self) -> Iterator[int]:
        """The free pages of held sectors, in the order in which they will be handed out."""
        for free in self._open.values():
            yield from reversed(free)

    def held_sectors(self) -> set[int]:
        """The sectors that this group holds."""
        return {p // self.pages_per_unit for p, count in enumerate(self.references) if count}

    def check_invariants(self) -> None:
        """Asserts that open pages are exactly the free pages of held sectors.

        Raises:
            AssertionError: which invariant is broken, and where.
        """
        held = self.held_sectors()
        assert NULL_BLOCK not in held, "a page of the null sector is held"
        assert sum(map(bool, self.references)) == self.num_held, "held pages are miscounted"
        for sector in held:
            assert self.units.references[sector] == 1, f"sector {sector} is used but not held"
        first = {s: s * self.pages_per_unit for s in held}
        free = {p for s in held for p in range(first[s], first[s] + self.pages_per_unit) if not self.references[p]}
        assert free == set(self.free_blocks()), "open pages are not the free pages of held sectors"
        assert self.num_open == len(free), "a page is open twice"
