"""Pages for tokens that are only drafts, and the way back when they are wrong.

Drafted tokens get slots like any others, and nothing counts them as computed until they are verified. Pages that only
wrong ones had go back, other wrong entries are written over. A state that has seen a wrong draft cannot unsee it: it is
copied before them, for the length of a step, and when it has to go back, the tokens since then are computed again with
the next chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvlab.cache.kept import PageCopy

if TYPE_CHECKING:
    from kvlab.cache.manager import KVCacheManager


class Drafts:
    """The drafts of all requests in the current step.

    allocate -> make `copies` -> compute -> settle -> make `Restart.copies` -> drop
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self.cache = cache
        # a page of each state group
        self._held: dict[str, list[int]] = {}

    def allocate(self, request_id: str, known: int, drafts: int) -> bool:
        """Whether `drafts` tokens behind the request's `known` tokens now have slots, and a way back.

        Where forgetting entries would not do, a page for a copy of each state is taken. Takes nothing without room.
        """
        cache = self.cache
        needed = cache._needed(request_id, known + drafts, False)
        copied = bool(cache._stale(known + drafts, known))
        for g in cache.kept.pools if copied else ():
            needed[g] += 1
        if cache._short(needed):
            return False
        cache.make_room(needed)
        taken = cache.allocate(request_id, known + drafts)
        assert taken, f"request {request_id}: pages for drafts were counted and are not there"
        if copied:
            self._held[request_id] = [pool.allocate(1)[0] for pool in cache.kept.pools.values()]
        return True

    def copies(self, request_id: str, restore: bool = False) -> tuple[PageCopy, ...]:
        """What to copy to keep the request's states, or to bring them back; () when none need to be."""
        tables = self.cache.tables[request_id]
        pairs = zip(self.cache.kept.pools, self._held.get(request_id, ()), strict=False)
        return tuple((g, page, tables[g][0]) if restore else (g, tables[g][0], page) for g, page in pairs)

    def settle(self, request_id: str, start: int, end: int, verified: int) -> tuple[int, tuple[PageCopy, ...]]:
        """(tokens that count as computed, copies to make) when `verified` of the `end` tokens turned out right.

        The step computed them from `start` on: there the request goes on where a state has to be copied back, and at
        `verified` otherwise.
        """
        # only wrong drafts had the pages behind
        self.cache._cut(request_id, verified + 1)
        if verified == end or not self.cache._stale(end, verified):
            return verified, ()
        copies = self.copies(request_id, restore=True)
        assert copies, f"request {request_id}: no copy of its states from before its drafts"
        return start, copies

    def drop(self, request_id: str) -> int:
        """Pages given back by forgetting the copies of the request's states."""
        pages = self._held.pop(request_id, [])
        for pool, page in zip(self.cache.kept.pools.values(), pages, strict=False):
            pool.free([page])
        return len(pages)

    def pages(self) -> Iterator[tuple[int, int]]:
        """(group, page) of every copy."""
        for pages in self._held.values():
            yield from zip(self.cache.kept.pools, pages, strict=True)
