"""Who is evicted next, among cached pages that nobody holds. Both designs of the index use these orders.

An item is a page, by a number that no other page of the manager has. All orders agree on one point: a page never goes
before the pages that continue its history, because whoever uses those uses it too. So no index is left with holes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence

from kvlab.cache.prefix.options import PrefixOptions


class LeastRecent:
    """Least recently used first; under "ttl" an item also goes when it was unused for that long.

    What became unused at once is a batch. An item's entry in a batch is stale once it is in use again; `_batch` has the
    number of the batch that counts for it, 0 for none.

    `ranks`: whether anything but the time of the last use counts, so that `used`, `hit`, `inserted`, `forget` matter.
    """

    ranks = False

    def __init__(self, options: PrefixOptions, size: int) -> None:
        self.ttl = options.ttl if options.eviction == "ttl" else None
        # (number, since when, items from the last to go to the first), the first to go in front
        self._batches: deque[tuple[int, float, list[int]]] = deque()
        self._batch = [0] * size
        self._number = self._len = self._entries = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        """The items in the order in which they go."""
        batch = self._batch
        return (item for number, _, items in self._batches for item in reversed(items) if batch[item] == number)

    def add(self, items: Sequence[int], now: float) -> None:
        """`items` are unused from now on; the first of them goes first."""
        self._number += 1
        number, batch = self._number, self._batch
        for item in items:
            batch[item] = number
        self._batches.append((number, now, [*reversed(items)]))
        self._len += len(items)
        self._entries += len(items)
        if self._entries > 2 * self._len + 64:
            self._clean()

    def _clean(self) -> None:
        """Forgets stale entries."""
        batch, old = self._batch, self._batches
        self._batches = deque(
            (number, since, live) for number, since, items in old if (live := [i for i in items if batch[i] == number])
        )
        self._entries = self._len

    def remove(self, items: Sequence[int]) -> None:
        """`items` are in use, or gone."""
        batch = self._batch
        for item in items:
            assert batch[item], f"item {item} is in use already"
            batch[item] = 0
        self._len -= len(items)

    def take(self, count: int) -> list[int]:
        """The items that go, at most `count`; they are no longer here."""
        found: list[int] = []
        while len(found) < count and self._batches:
            found += self._take_first(count - len(found))
        self.remove(found)
        return found

    def _take_first(self, count: int) -> list[int]:
        """Items of the first batch, whose entries, at most `count`, are taken out."""
        (number, _, items), batch = self._batches[0], self._batch
        rest = max(0, len(items) - count)
        found = [item for item in reversed(items[rest:]) if batch[item] == number]
        self._entries -= len(items) - rest
        del items[rest:]
        if not items:
            self._batches.popleft()
        return found

    def expired(self, now: float) -> list[int]:
        """The items that were unused for too long, in the order in which they go; they are no longer here."""
        found: list[int] = []
        while self.ttl is not None and self._batches and now - self._batches[0][1] >= self.ttl:
            found += self._take_first(len(self._batches[0][2]))
        self.remove(found)
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

    def __init__(self, options: PrefixOptions, size: int) -> None:
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

    def remove(self, items: Sequence[int]) -> None:
        for item in items:
            del self._idle[item]

    def expired(self, now: float) -> list[int]:
        return []

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

    def __init__(self, options: PrefixOptions, size: int) -> None:
        super().__init__(options, size)
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


def eviction_order(options: PrefixOptions, size: int) -> LeastRecent:
    """An empty order of the kind that the options name, for items below `size`."""
    return ORDERS[options.eviction](options, size)
