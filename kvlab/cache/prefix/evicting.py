"""How cached pages go: one by one in the order of the policy, when their place is needed or their time is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvlab.cache.pool import NULL_BLOCK, BlockPool
from kvlab.cache.prefix.index import Column, PrefixIndex
from kvlab.cache.prefix.options import PrefixOptions
from kvlab.cache.prefix.order import LeastRecent
from kvlab.cache.prefix.records import Counters
from kvlab.cache.prefix.rules import GroupRule
from kvlab.cache.sectors import SectorPages
from kvlab.specs.pools import PoolLayout

Pages = BlockPool | SectorPages


class Evicting:
    """The shrinking half of `kvlab.cache.prefix.prefix.PrefixCache`."""

    pools: tuple[Pages, ...]
    columns: list[Column]
    rules: list[GroupRule]
    index: PrefixIndex
    orders: list[LeastRecent]
    counters: Counters
    version: int
    now: float
    on_evict: Callable[[Sequence[int], str], None] | None
    options: PrefixOptions
    _needed: str
    _layout: PoolLayout
    _spaces: Sequence[tuple[int, Pages]]

    def _group_of(self, pool: Pages) -> int:
        return next(g for g, own in enumerate(self.pools) if own is pool)

    def _page_of(self, item: int) -> tuple[Pages, int]:
        """The pool and page id that a number among all pages stands for."""
        start, pool = next((s, p) for s, p in reversed(self._spaces) if item >= s)
        return pool, item - start

    def named(self, items: Iterable[int]) -> list[tuple[int, int]]:
        """(group, page) of numbers that `on_evict` was called with; where groups share a pool, the first of them."""
        return [(self._group_of(pool), page) for pool, page in map(self._page_of, items)]

    def evict(self, pool: int, count: int = 1) -> int:
        """How many pages of that pool of units were dropped, at most `count`, in the order of the policy."""
        return self._evict(pool, count, self._needed)

    def _evict(self, pool: int, count: int, why: str) -> int:
        order = self.orders[pool]
        items = order.take(count)
        self._drop(items, order, why)
        return len(items)

    def _give_up(self, pool: Pages, units: int, count: int) -> None:
        while pool.num_free < count and self.evict(units):
            pass

    def expire(self, now: float) -> int:
        """How many pages were dropped because nobody used them for too long; `now` is what later times are from."""
        self.now, gone = now, 0
        for order in self.orders:
            items = order.expired(now)
            self._drop(items, order, f"unused for {self.options.ttl:g} s")
            gone += len(items)
        return gone

    def clear(self) -> int:
        """How many pages were dropped: all that nobody holds. For a change of tokenizer, template or weights."""
        return sum(self._evict(pool, len(order), "cleared") for pool, order in enumerate(self.orders))

    def _expel(self, group: int, pages: Iterable[int]) -> int:
        """How many of a group's cached pages were dropped at once, those that somebody holds included."""
        pool, order = self.pools[group], self.orders[self._layout.pool_of(group)]
        base = self.columns[self.rules[group].columns[0]].base
        items = [page + base for page in pages if page]
        order.remove([item for item in items if not pool.references[item - base]])
        self._drop(items, order, "a reader's numbers are not finite")
        return len(items)

    def steal(self, group: int, page: int) -> None:
        """Takes an unused page out of the cache with what is in it: it has one holder from now on, and no name."""
        pool, item = self.pools[group], page + self.columns[self.rules[group].columns[0]].base
        if self.on_evict:
            self.on_evict([item], "a request took it over")
        pool.touch([page])
        pool.cached[page] = False
        self.index.drop([item])
        self.orders[self._layout.pool_of(group)].forget([item])
        self.version += 1

    def _drop(self, items: Sequence[int], order: LeastRecent, why: str = "") -> None:
        if not items:
            return
        if self.on_evict:
            self.on_evict(items, why)
        self.index.drop(items)
        if order.ranks:
            order.forget(items)
        if len(self._spaces) == 1:
            self._spaces[0][1].uncache(items)
        else:
            for start, pool in self._spaces:
                own = [item - start for item in items if start <= item < start + pool.num_blocks]
                if own:
                    pool.uncache(own)
        self.counters.evicted += len(items)
        self.version += 1

    def cached_pages(self) -> Iterator[tuple[int, int]]:
        """(group, page) of every cached page that nobody holds, in the order in which they go, pool by pool."""
        for order in self.orders:
            yield from self.named(order)

    def check(self) -> None:
        """Asserts that index, pools and orders agree.

        Raises:
            AssertionError: what differs.
        """
        self.index.check(self.columns)
        found, histories = set(), set()
        for item, history, column in self.index.entries():
            assert item not in found, f"page {item} is in the index twice"
            assert (history, column) not in histories, "one history has two pages in one column"
            found.add(item)
            histories.add((history, column))
        marked = {
            start + page for start, pool in self._spaces for page in range(1, pool.num_blocks) if pool.cached[page]
        }
        assert found == marked, "pages in the index are not the pages marked as cached"
        assert not any(pool.cached[NULL_BLOCK] for _, pool in self._spaces), "a null page is cached"
        idle = {start + page for start, pool in self._spaces for page in range(1, pool.num_blocks)
                if pool.cached[page] and not pool.references[page]}  # fmt: skip
        ordered = [item for order in self.orders for item in order]
        assert len(ordered) == len(set(ordered)) and set(ordered) == idle, "evictable pages are not the unused ones"
        assert sum(pool.num_idle for _, pool in self._spaces) == len(idle), "unused pages are miscounted"
