"""Pages of one group cut from sectors that all groups share.

Invariants:
    page p of a group lies in sector p // pages_per_unit; sector 0 is the null sector, so no page in it is given out;
    a sector is held by one group at a time, as long as one of its pages is held or cached;
    a new sector is taken only when no held one has a free page, so one sequence alone never takes more sectors
    than its pages fill.

Source: transformers 5.24 generation/continuous_batching (sectors); it differs by taking pages one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

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
        self.references = [0] * self.num_blocks
        self.num_held = 0
        # pages that the prefix cache can find, and how many of them nobody holds: in all, and in quiet sectors, which
        # have no page that anybody holds
        self.cached, self.num_idle = [False] * self.num_blocks, 0
        self.num_quiet = self.num_idle_quiet = 0
        self._busy, self._idle = array("i", bytes(4 * units.num_blocks)), array("i", bytes(4 * units.num_blocks))
        self.on_free: Callable[[list[int]], None] | None = None
        self.on_idle: Callable[[list[int]], None] | None = None
        self.on_busy: Callable[[list[int]], None] | None = None
        self.on_short: Callable[[int], None] | None = None
        # free pages of held sectors, the sector that opened first at the front
        self._open: dict[int, list[int]] = {}

    @property
    def num_open(self) -> int:
        """Free pages in sectors that this group holds: no other group can have them."""
        return sum(map(len, self._open.values()))

    @property
    def num_spare(self) -> int:
        """Free and idle pages in sectors that are held anyway, by a page that somebody holds."""
        return self.num_open + self.num_idle - self.num_quiet * self.pages_per_unit

    @property
    def num_free(self) -> int:
        """Pages this group could get if no other group asked."""
        return self.num_open + self.units.num_free * self.pages_per_unit

    def allocate(self, count: int) -> list[int]:
        """`count` free pages, each with one reference: from held sectors first.

        Raises:
            ValueError: fewer than `count` pages can be had; none is taken then.
        """
        if count > self.num_free and self.on_short:
            self.on_short(count)
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
            self._count(page, 1, 0)
            pages.append(page)
        return pages

    def touch(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each page, which is held or idle; an idle one is held from now on."""
        busy = []
        for page in blocks:
            assert page != NULL_BLOCK, "the null page is not counted"
            if self.references[page]:
                self.references[page] += 1
                continue
            assert self.cached[page], f"page {page} is free: nobody can touch it"
            self.references[page] = 1
            self._count(page, 1, -1)
            busy.append(page)
        if busy and self.on_busy:
            self.on_busy(busy)

    def _count(self, page: int, held: int, idle: int) -> None:
        """Counts one more, or one fewer, held and idle page in the page's sector."""
        sector = page // self.pages_per_unit
        before = self._idle[sector] if not self._busy[sector] else 0
        self._busy[sector] += held
        self._idle[sector] += idle
        after = self._idle[sector] if not self._busy[sector] else 0
        self.num_held += held
        self.num_idle += idle
        self.num_quiet += bool(after) - bool(before)
        self.num_idle_quiet += after - before

    def free(self, blocks: Sequence[int]) -> None:
        """Drops one reference per listed page; null pages are skipped. Cached pages become idle, the last one first.

        A sector without held and idle pages goes back.
        """
        released, idle = [], []
        for page in reversed(blocks):
            if page == NULL_BLOCK:
                continue
            assert self.references[page] > 0, f"page {page} is freed more often than it was taken"
            self.references[page] -= 1
            if not self.references[page]:
                self._count(page, -1, self.cached[page])
                (idle if self.cached[page] else released).append(page)
        if idle and self.on_idle:
            self.on_idle(idle)
        self._open_up(released)

    def uncache(self, blocks: Sequence[int]) -> None:
        """The prefix cache has no more use for the pages; those that nobody holds are free."""
        released = []
        for block in blocks:
            self.cached[block] = False
            if not self.references[block]:
                self._count(block, 0, -1)
                released.append(block)
        self._open_up(released)

    def _open_up(self, released: list[int]) -> None:
        """Puts free pages where the next to be taken are, and gives empty sectors back."""
        for page in released:
            self._open.setdefault(page // self.pages_per_unit, []).append(page)
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
        return {p // self.pages_per_unit for p, count in enumerate(self.references) if count or self.cached[p]}

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
        free = {p for s in held for p in range(first[s], first[s] + self.pages_per_unit)
                if not self.references[p] and not self.cached[p]}  # fmt: skip
        assert free == set(self.free_blocks()), "open pages are not the free pages of held sectors"
        assert self.num_open == len(free), "a page is open twice"
        quiet = {s for s in held if not any(self.references[first[s] : first[s] + self.pages_per_unit])}
        idle = [p for p, cached in enumerate(self.cached) if cached and not self.references[p]]
        counted = (self.num_idle, self.num_quiet, self.num_idle_quiet)
        assert counted == (len(idle), len(quiet), sum(p // self.pages_per_unit in quiet for p in idle)), (
            "idle miscounted"
        )
