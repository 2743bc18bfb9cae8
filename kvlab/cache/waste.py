"""What every byte of the pools is for, now. useful + all kinds of waste + free + null = storage, exactly."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields

from kvlab.cache.manager import KVCacheManager
from kvlab.cache.pool import NULL_BLOCK
from kvlab.specs.layout import Group
from kvlab.specs.parts import Retention


@dataclass(frozen=True)
class PoolUse:
    """Bytes of the pools.

    Attributes:
        useful: entries that a later query reads, and states.
        page_tail: rows of pages with useful entries that hold none: not filled yet, or behind a window.
        padding: bytes that never carry data: alignment, pages larger than a layer needs, unpaired layers.
        reserve: pages without a useful entry: for the tokens of a step, or kept for stepping back.
        kept_states: copies of states.
        cached: pages that nobody holds and the prefix cache can find, and what only they keep from being free.
        remainder: free pages of sectors that a group holds: no other group can have them.
        free: units that nobody holds.
        null: the null unit of each pool.
    """

    useful: int = 0
    page_tail: int = 0
    padding: int = 0
    reserve: int = 0
    kept_states: int = 0
    cached: int = 0
    remainder: int = 0
    free: int = 0
    null: int = 0

    @property
    def storage(self) -> int:
        """All bytes of the pools."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def held(self) -> int:
        """Bytes of the units that requests hold."""
        return self.storage - self.free - self.null - self.cached


def pool_use(manager: KVCacheManager) -> PoolUse:
    """What every byte of `manager`'s pools is for. A page that several requests hold counts once."""
    found = dict.fromkeys((field.name for field in fields(PoolUse)), 0)
    layout = manager.layout
    counted: set[int] = set()
    for g, (group, pool) in enumerate(zip(layout.groups, manager.pools, strict=True)):
        cost, rows = layout.page_bytes(g), max(1, group.layouts[0].block_size)
        row = sum(page.used_bytes for page in group.layouts) // rows
        pages = _held_rows(manager, g)
        for useful in pages.values():
            if useful:
                found["useful"] += useful * row
                found["page_tail"] += (rows - useful) * row
                found["padding"] += cost - rows * row
            else:
                found["reserve"] += cost
        copies = (*manager.kept.pages(), *manager.snapshots.pages(), *manager.drafts.pages(), *manager._sources)
        found["kept_states"] += cost * len({page for own, page in copies if own == g} - pages.keys())
        if id(pool) not in counted:
            counted.add(id(pool))
            idle = manager.cached_bytes(g)
            found["cached"] += idle
            found["remainder"] += cost * (pool.num_open + pool.num_idle) - idle
    for units, size in zip(manager.unit_pools, layout.unit_bytes, strict=True):
        found["free"] += size * units.num_free
        found["null"] += size
    return PoolUse(**found)


def _held_rows(manager: KVCacheManager, group: int) -> dict[int, int]:
    """For each page of the group that a table has, how many of its rows a request that holds it reads."""
    pages: dict[int, int] = {}
    for request_id, computed in manager.computed.items():
        table = manager.tables[request_id][group]
        held = [page for page in table if page != NULL_BLOCK]
        for page, useful in zip(held, _useful_rows(manager.groups[group], table, computed), strict=True):
            pages[page] = max(useful, pages.get(page, 0))
    return pages


def _useful_rows(group: Group, table: array[int], computed: int) -> list[int]:
    """For each page held in `table`, how many of its rows a query at `computed` or later reads."""
    rule, size = group.retention, group.block_size
    if rule.rule == "state":
        return [int(computed > 0)] * len(table)
    if rule.rule == "stride":
        entries, per_page = computed // rule.size, size // rule.size
        return [min(per_page, max(0, entries - i * per_page)) for i in range(len(table))]
    first = _first_live(rule, computed)
    spans = [(i * size, min((i + 1) * size, computed)) for i, page in enumerate(table) if page != NULL_BLOCK]
    return [_overlap(start, end, first, computed) + _overlap(start, end, 0, min(rule.sinks, first))
            for start, end in spans]  # fmt: skip


def _first_live(rule: Retention, computed: int) -> int:
    """The first position behind the sinks that a query at `computed` reads."""
    if rule.rule == "window":
        return max(0, computed - rule.size + 1)
    return computed // rule.size * rule.size if rule.rule == "chunk" else 0


def _overlap(start: int, end: int, low: int, high: int) -> int:
    return max(0, min(end, high) - max(start, low))
