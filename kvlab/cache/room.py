"""Whether something fits: pages counted against units, with idle cached pages as room that can be had."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import mul
from typing import TYPE_CHECKING

from kvlab.cache.kept import KeptStates
from kvlab.cache.pool import BlockPool
from kvlab.cache.sectors import SectorPages
from kvlab.specs.layout import Group
from kvlab.specs.pages import cdiv, table_pages
from kvlab.specs.pools import PoolLayout
from kvlab.specs.rollback import RollbackPolicy

if TYPE_CHECKING:
    from kvlab.cache.prefix import Hit, PrefixCache


class Room:
    """The counting half of `kvlab.cache.manager.KVCacheManager`."""

    layout: PoolLayout
    groups: tuple[Group, ...]
    rollback: RollbackPolicy
    in_flight: int
    unit_pools: list[BlockPool]
    pools: tuple[BlockPool | SectorPages, ...]
    tables: dict[str, tuple[array[int], ...]]
    kept: KeptStates
    prefix: PrefixCache | None
    _reach: list[int]

    def too_long(self, tokens: int) -> str:
        """Why a sequence of `tokens` tokens could never fit these pools, even empty ones; "" when it can."""
        pages = self.layout.sequence_pages(tokens, self.in_flight, self.rollback)
        for pool, need in enumerate(self.layout.units(pages)):
            have = self.unit_pools[pool].num_blocks - 1
            if need > have and self.layout.policy == "per_kind":
                return f"{tokens} tokens take {need} pages of group {self.groups[pool].name}, the pool has {have}"
            if need > have:
                unit = "sectors" if self.layout.policy == "sectors" else "pages"
                return f"{tokens} tokens take {need} {unit} over all groups, the pool has {have}"
        return ""

    def has_room(self, tokens: int, spare: int = 0, hit: Hit | None = None) -> bool:
        """Whether a new sequence of `tokens` tokens fits beside what is held, `spare` pages of each group left over.

        Pages of its hit that others hold cost nothing; those that nobody holds are room that it takes up.
        """
        return not self._short(self._sequence(tokens, spare, hit))

    def _sequence(self, tokens: int, spare: int = 0, hit: Hit | None = None) -> list[int]:
        """The most pages of each group that the sequence takes on its way to `tokens` tokens, and spare ones."""
        counts = self.layout.sequence_pages(tokens, self.in_flight, self.rollback)
        for g, group in enumerate(self.groups):
            # a state grows by nothing, unless copies of it are kept
            counts[g] += spare if group.retention.rule != "state" or self.rollback.most(2**31) else 0
            if hit:
                references = self.pools[g].references
                counts[g] = max(0, counts[g] - sum(1 for page in hit.tables[g] if page and references[page]))
        return counts

    def _has_slots(self, request_id: str, tokens: int) -> bool:
        """Whether the request's tables have a place for its first `tokens` tokens already."""
        tables = self.tables.get(request_id)
        return tables is not None and min(map(mul, map(len, tables), self._reach)) >= tokens

    def missing(self, request_id: str, tokens: int, keep_state: bool = False) -> int:
        """Units short, over all pools, of giving the first `tokens` tokens slots; 0 when `allocate` will succeed."""
        return self._short(self._needed(request_id, tokens, keep_state))

    def _needed(self, request_id: str, tokens: int, keep_state: bool) -> list[int]:
        tables = self.tables.get(request_id)
        counts = []
        for g, group in enumerate(self.groups):
            have = len(tables[g]) if tables else 0
            counts.append(max(0, table_pages(group.retention, group.block_size, tokens) - have))
        for g in self.kept.pools if keep_state else ():
            counts[g] += self.kept.extra_pages(request_id, tokens)
        return counts

    def _short(self, pages: Sequence[int]) -> int:
        """Units short, over all pools, of so many more pages of each group, once idle pages make room."""
        need = [0] * len(self.unit_pools)
        have = [units.num_free + units.num_idle for units in self.unit_pools]
        for g, count in enumerate(pages):
            pool, p = self.pools[g], self.layout.pool_of(g)
            if count:
                need[p] += cdiv(max(0, count - pool.num_spare), pool.pages_per_unit)
            if pool is not self.unit_pools[p]:
                have[p] += pool.num_quiet
        return sum(max(0, n - h) for n, h in zip(need, have, strict=True))

    def make_room(self, pages: Sequence[int]) -> None:
        """Evicts idle pages, in the order of the policy, until so many more pages of each group are free.

        `_short(pages)` must be 0: idle pages suffice.
        """
        while any(short := self._short_now(pages)):
            assert self.prefix, "no room, and nothing to evict"
            gone = sum(self.prefix.evict(pool, count) for pool, count in enumerate(short) if count)
            assert gone, "room was counted that eviction does not make"

    def _short_now(self, pages: Sequence[int]) -> list[int]:
        """Pages to evict next of each pool; of shared sectors one, as it may free no sector or a whole one."""
        need = [0] * len(self.unit_pools)
        for g, count in enumerate(pages):
            if count:
                pool = self.pools[g]
                need[self.layout.pool_of(g)] += cdiv(max(0, count - pool.num_open), pool.pages_per_unit)
        short = [max(0, n - units.num_free) for n, units in zip(need, self.unit_pools, strict=True)]
        return [min(1, n) for n in short] if self.layout.policy == "sectors" else short

    @property
    def keeps_states(self) -> bool:
        """Whether any group has states to keep."""
        return bool(self.kept.pools)

    @property
    def num_free(self) -> int:
        """Free units over all pools."""
        return sum(units.num_free for units in self.unit_pools)

    @property
    def held_bytes(self) -> int:
        """Bytes of the units that requests hold, page rounding included; cached pages that nobody holds are not."""
        held = sum(p.num_held * size for p, size in zip(self.unit_pools, self.layout.unit_bytes, strict=True))
        return held - sum(self.cached_bytes(g) for g, pool in enumerate(self.pools) if isinstance(pool, SectorPages))

    def cached_bytes(self, group: int) -> int:
        """Bytes of pages of that group's pool that are cached and held by nobody, and what only these keep from being
        free: free pages beside them in a sector."""
        pool = self.pools[group]
        idle = pool.num_idle
        if isinstance(pool, SectorPages):
            idle += pool.num_quiet * pool.pages_per_unit - pool.num_idle_quiet
        return idle * self.layout.page_bytes(group)
