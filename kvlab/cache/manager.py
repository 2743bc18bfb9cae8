"""The cache manager: one block table per request and group, pages taken and given back by retention.

Groups (see `kvlab.specs.layout.Group`) are parts of equal retention. Each has its own pool of page ids; a page id
addresses that page in the buffer of each of the group's layers. A table only grows at its end; entries that no later
query reads become null when `advance` is told how far the sequence is certain.

    request -> allocate(tokens)   pages so that the first `tokens` tokens have slots, in every group or in none
            -> advance(computed)  tokens up to here are certain: pages behind a window go back
            -> free()             everything goes back
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from kvlab.cache.pool import NULL_BLOCK, BlockPool
from kvlab.specs.layout import Group
from kvlab.specs.pages import PAGED_RULES, cdiv, dead_pages, most_pages


class KVCacheManager:
    """Block tables of all live requests, over one pool per group.

    Args:
        groups: what `kvlab.specs.layout.group_parts` returns.
        num_blocks: pages of each group's pool, the null page included.
        in_flight: the most tokens of one request that one step may add.
        order: for tests and experiments, the order in which each pool hands out its blocks at first.

    Raises:
        ValueError: a retention rule that has no pages by position, or a pool too small.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        num_blocks: Sequence[int],
        in_flight: int,
        order: Sequence[Sequence[int] | None] | None = None,
    ) -> None:
        for group in groups:
            if group.retention.rule not in PAGED_RULES:
                raise ValueError(f"group {group.name}: retention {group.retention.rule!r} is not in the engine yet")
        self.groups = tuple(groups)
        self.in_flight = in_flight
        self.pools = tuple(BlockPool(n, o) for n, o in zip(num_blocks, order or [None] * len(groups), strict=True))
        self.tables: dict[str, tuple[array[int], ...]] = {}
        # per request and group: table entries before this one (behind the sinks) are null already
        self._cleared: dict[str, list[int]] = {}

    def too_long(self, tokens: int) -> str:
        """Why a sequence of `tokens` tokens could never fit these pools, even empty ones; "" when it can."""
        for group, pool in zip(self.groups, self.pools, strict=True):
            need = most_pages(group.retention, group.block_size, tokens, self.in_flight)
            if need > pool.num_blocks - 1:
                return f"{tokens} tokens take {need} pages of group {group.name}, the pool has {pool.num_blocks - 1}"
        return ""

    def has_room(self, tokens: int, spare: int = 0) -> bool:
        """Whether a new sequence of `tokens` tokens fits beside what is held, `spare` pages of each group left over."""
        return all(
            most_pages(group.retention, group.block_size, tokens, self.in_flight) + spare <= pool.num_free
            for group, pool in zip(self.groups, self.pools, strict=True)
        )

    def missing(self, request_id: str, tokens: int) -> int:
        """Pages short, over all groups, of giving the first `tokens` tokens slots; 0 when `allocate` will succeed."""
        table = self.tables.get(request_id)
        short = 0
        for i, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            have = len(table[i]) if table else 0
            short += max(0, cdiv(tokens, group.block_size) - have - pool.num_free)
        return short

    def allocate(self, request_id: str, tokens: int) -> bool:
        """Whether the request's first `tokens` tokens now have slots in every group; takes nothing when they cannot.

        Pages behind a window are not given to a request that starts late: the tokens of one step are computed
        together, so they all need slots.
        """
        if self.missing(request_id, tokens):
            return False
        tables = self.tables.setdefault(request_id, tuple(array("i") for _ in self.groups))
        self._cleared.setdefault(request_id, [0] * len(self.groups))
        for group, pool, table in zip(self.groups, self.pools, tables, strict=True):
            new = cdiv(tokens, group.block_size) - len(table)
            if new > 0:
                table.extend(pool.allocate(new))
        return True

    def advance(self, request_id: str, computed: int) -> int:
        """Pages given back now that the request's first `computed` tokens are certain (processed, not to be undone)."""
        given_back = 0
        tables, cleared = self.tables[request_id], self._cleared[request_id]
        for i, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            dead = dead_pages(group.retention, group.block_size, computed)
            start = max(cleared[i], dead.start)
            if start >= dead.stop:
                continue
            pages = tables[i][start : dead.stop]
            tables[i][start : dead.stop] = array("i", [NULL_BLOCK]) * len(pages)
            pool.free(pages)
            cleared[i] = dead.stop
            given_back += len(pages)
        return given_back

    def free(self, request_id: str) -> int:
        """Pages given back by forgetting the request; 0 when it holds none."""
        tables = self.tables.pop(request_id, ())
        self._cleared.pop(request_id, None)
        before = self.num_free
        for pool, table in zip(self.pools, tables, strict=False):
            pool.free(table)
        return self.num_free - before

    def block_table(self, request_id: str, group: int = 0) -> array[int]:
        """The request's table in that group: page ids by position, 0 where nothing is held. Not to be changed."""
        return self.tables[request_id][group]

    def slot_mapping(self, request_id: str, start: int, end: int, group: int = 0) -> list[int]:
        """Slots (page * block_size + offset) of the tokens at positions start .. end - 1.

        Raises:
            ValueError: a position whose page was given back or never taken.
        """
        table, size = self.tables[request_id][group], self.groups[group].block_size
        if end > len(table) * size or (start < end and NULL_BLOCK in table[start // size : cdiv(end, size)]):
            raise ValueError(f"positions {start} to {end}: not all have a page in request {request_id}")
        return [table[i // size] * size + i % size for i in range(start, end)]

    @property
    def num_free(self) -> int:
        """Free pages over all groups."""
        return sum(pool.num_free for pool in self.pools)

    @property
    def held_bytes(self) -> int:
        """Bytes of the pages that requests hold, page rounding included."""
        return sum(p.num_held * g.page_bytes for g, p in zip(self.groups, self.pools, strict=True))

    def check_invariants(self) -> None:
        """Asserts the pools' invariants, and that their references are exactly the tables' entries.

        Raises:
            AssertionError: names the group and the block.
        """
        for i, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            pool.check_invariants()
            held = Counter(block for tables in self.tables.values() for block in tables[i] if block != NULL_BLOCK)
            for block in range(1, pool.num_blocks):
                assert pool.references[block] == held[block], (
                    f"group {group.name}, block {block}: {pool.references[block]} references, {held[block]} in tables"
                )
            assert pool.num_free + pool.num_held == pool.num_blocks - 1
