"""The invariants of tables and pools together: what tests and `check=True` hold after every step."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvlab.cache.pool import NULL_BLOCK
from kvlab.cache.sectors import SectorPages

if TYPE_CHECKING:
    from kvlab.cache.manager import KVCacheManager


def check_invariants(manager: KVCacheManager) -> None:
    """Asserts the pools' own invariants, that their references are exactly the pages in tables and kept states, and
    that no sector has two groups.

    Raises:
        AssertionError: names the group and the block.
    """
    for units in manager.unit_pools:
        units.check_invariants()
        assert units.num_free + units.num_idle + units.num_held == units.num_blocks - 1
    # groups of one pool share its page ids
    held: dict[int, Counter[int]] = {id(pool): Counter() for pool in manager.pools}
    names: dict[tuple[int, int], str] = {}
    for g, page in _held_pages(manager):
        key = id(manager.pools[g])
        held[key][page] += 1
        names[key, page] = manager.groups[g].name
    for g, pool in enumerate(manager.pools):
        pool.check_invariants()
        for block in range(1, pool.num_blocks):
            count = held[id(pool)][block]
            assert pool.references[block] == count, (
                f"group {names.get((id(pool), block), manager.groups[g].name)}, block {block}: "
                f"{pool.references[block]} references, {count} in tables"
            )
    if manager.prefix:
        manager.prefix.check()
    if manager.layout.policy == "sectors":
        owned = [s for pool in manager.pools if isinstance(pool, SectorPages) for s in pool.held_sectors()]
        assert len(owned) == len(set(owned)) == manager.unit_pools[0].num_held, "a sector has two groups, or none"


def _held_pages(manager: KVCacheManager) -> list[tuple[int, int]]:
    found = [
        (g, page) for tables in manager.tables.values() for g, table in enumerate(tables) for page in table
        if page != NULL_BLOCK
    ]  # fmt: skip
    states = [*manager.kept.pages(), *manager.snapshots.pages(), *manager._sources]
    return found + states + list(manager.drafts.pages()) + list(manager.pins.pages())
