"""Pins: references to pages that copies hold while they read or write them. A pinned page is neither freed nor reused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from kvlab.cache.pool import BlockPool
from kvlab.cache.sectors import SectorPages

Page = tuple[int, int]
"""(group, page id)."""


class Pins:
    """The pins of all copies under way, over the pools of each group."""

    def __init__(self, pools: Sequence[BlockPool | SectorPages]) -> None:
        self._pools = pools
        self._count: Counter[Page] = Counter()

    def pin(self, pages: Iterable[Page]) -> None:
        """Adds a reference to each page, which someone holds now."""
        for group, page in pages:
            assert self._pools[group].references[page] > 0, f"page {page} of group {group} is held by nobody"
            self._pools[group].touch([page])
            self._count[group, page] += 1

    def unpin(self, pages: Iterable[Page]) -> None:
        """Drops a reference of each page; it is free once nobody else holds it."""
        for group, page in pages:
            assert self._count[group, page] > 0, f"page {page} of group {group} is not pinned"
            self._count[group, page] -= 1
            if not self._count[group, page]:
                del self._count[group, page]
            self._pools[group].free([page])

    @property
    def last_holds(self) -> int:
        """Pages that nobody but pins holds: they come free when the copies end."""
        return sum(self._pools[group].references[page] == n for (group, page), n in self._count.items())

    def pages(self) -> Iterator[Page]:
        """Every pinned page, as often as it is pinned."""
        return self._count.elements()
