"""Who is evicted next, among cached pages that nobody holds. Both designs of the index use these orders.

An item is a page, by a number that no other page of the manager has. All orders agree on one point: a page never goes
before the pages that continue its history, because whoever uses those uses it too. So no index is left with holes.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

from kvlab.cache.prefix.options import PrefixOptions


class LeastRecent:
    """Least recently used first; under "ttl" an item also goes when it was unused for that long.

    `ranks`: whether anything but the time of the last use counts, so that `used`, `hit`, `inserted`, `forget` matter.
    """

    ranks = False

    def __init__(self, options: PrefixOptions) -> None:
        self.ttl = options.ttl if options.eviction == "ttl" else None
        self._idle: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[int]:
        """The items in the order in which they go."""
        return iter(self._idle)

    def add(self, items: Sequence[int], now: float) -> None:
        """`items` are unused from now on; the first of them goes first."""
        self._idle.update(dict.fromkeys(items, now))

    def remove(self, items: Sequence[int]) -> None:
        """`items` are in use, or gone."""
        idle = self._idle
        for item in items:
            del idle[item]

    def take(self, count: int) -> list[int]:
        """The items that go, at most `count`; they are no longer here."""
        found = list(islice(self._idle, count))
        self.remove(found)
        return found

    def expired(self, now: float) -> list[int]:
        """The items that were unused for too long, in the order in which they go; they are still here."""
        if self.ttl is None:
            return []
        found = []
        for item, since in self._idle.items():
            if now - since < self.ttl:
                break
            found.append(item)
        return found

    def used(self, items: Sequence[int], priority: int) -> None:
        """A request of that priority was given `items`, in the order of its tokens."""

    def hit(self, items: Sequence[int]) -> None:
        """`items` were found in the cache by a request."""

    def inserted(self, items: Sequence[int]) -> None:
        """The request that holds `items` has put something behind them."""

    def forget(self, items: Sequence[int]) -> None:
        """`items` are no longer cached."""


class Ranked(LeastRecent):
    """Lowest rank first, then least recently used: a heap, in which entries of items that are in use again are stale."""

    ranks = True

    def __init__(self, options: PrefixOptions) -> None:
        self.ttl = None
        self._heap: list[tuple[float, int, int]] = []
        # item -> the number of its valid entry
        self._idle: dict[int, int] = {}
        self._rank: dict[int, float] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[int]:
        return (item for _, number, item in sorted(self._heap) if self._idle.get(item) == number)

    def add(self, items: Sequence[int], now: float) -> None:
        rank = self._rank
        for item in items:
            self._count += 1
            self._idle[item] = self._count
            heapq.heappush(self._heap, (rank.get(item, 0), self._count, item))
        if len(self._heap) > 2 * len(self._idle) + 64:
            self._heap = [entry for entry in self._heap if self._idle.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def take(self, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count and self._idle:
            _, number, item = heapq.heappop(self._heap)
            if self._idle.get(item) == number:
                del self._idle[item]
                found.append(item)
        return found

    def forget(self, items: Sequence[int]) -> None:
        for item in items:
            self._rank.pop(item, None)


class LeastFrequent(Ranked):
    """The fewest hits first."""

    def hit(self, items: Sequence[int]) -> None:
        for item in items:
            self._rank[item] = self._rank.get(item, 0) + 1


class FirstIn(Ranked):
    """The oldest insertion first; a page counts as inserted again whenever something is inserted behind it.

    Within one sequence its end is the older: it goes first.
    """

    def __init__(self, options: PrefixOptions) -> None:
        super().__init__(options)
        self._stamp = 0

    def inserted(self, items: Sequence[int]) -> None:
        for item in reversed(items):
            self._stamp += 1
            self._rank[item] = self._stamp


class LeastUrgent(Ranked):
    """The highest priority number first, where the most urgent user of a page counts."""

    def used(self, items: Sequence[int], priority: int) -> None:
        for item in items:
            self._rank[item] = max(self._rank.get(item, -priority), -priority)


ORDERS = {"lru": LeastRecent, "ttl": LeastRecent, "lfu": LeastFrequent, "fifo": FirstIn, "priority": LeastUrgent}


def eviction_order(options: PrefixOptions) -> LeastRecent:
    """An empty order of the kind that the options name."""
    return ORDERS[options.eviction](options)
