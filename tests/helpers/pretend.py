"""A model and copies that are pretended: what a page holds is a note of which tokens led to it.

`Memory` writes such a note for every token that a step computes and reads, before it, every note that the token's query
would read. A page that was freed, reused, half copied or copied too late holds another note, or none.
"""

from __future__ import annotations

from typing import Any

from kvlab.cache import KVCacheManager
from kvlab.cache.pool import NULL_BLOCK
from kvlab.specs.pages import table_pages

Contents = dict[int, Any]
"""offset -> note; of a state, 0 -> all its tokens."""


class Memory:
    """The contents of every page, and of every slot below it."""

    def __init__(self, cache: KVCacheManager) -> None:
        self.cache = cache
        self.pages: dict[tuple[int, int], Contents] = {}
        self.slots: dict[tuple[int, int], Contents] = {}
        groups_of: dict[int, list[int]] = {}
        for g, pool in enumerate(cache.pools):
            groups_of.setdefault(id(pool), []).append(g)
        for own in groups_of.values():
            cache.pools[own[0]].on_free = lambda blocks, own=own: self._forget(own, blocks)

    def _forget(self, groups: list[int], blocks: list[int]) -> None:
        for block in blocks:
            for g in groups:
                self.pages.pop((g, block), None)

    def compute(self, chunk) -> None:
        """Reads what the chunk's first query reads, then writes the chunk's tokens."""
        request, start, end = chunk.request, chunk.start, chunk.start + chunk.count
        tokens = request.tokens[:end]
        for g, group in enumerate(self.cache.groups):
            table, rule = self.cache.block_table(request.request_id, g), group.retention
            if rule.rule == "state":
                self._step_state(g, table, tokens, start)
                continue
            size = group.block_size
            if rule.rule == "stride":
                per_page, size = size // rule.size, rule.size
                self._check(g, table, tokens, range(start // size), per_page, size)
                self._write(g, table, tokens, range(start // size, end // size), per_page, size)
                continue
            first = max(0, start - rule.size + 1) if rule.rule == "window" else 0
            first = start // rule.size * rule.size if rule.rule == "chunk" else first
            self._check(g, table, tokens, range(first, start), size, 1)
            self._write(g, table, tokens, range(start, end), size, 1)

    def _check(self, g, table, tokens, entries: range, per_page: int, stride: int) -> None:
        for i in entries:
            page = table[i // per_page]
            assert page != NULL_BLOCK, f"group {g}: entry {i} is read and was given back"
            found = self.pages.get((g, page), {}).get(i % per_page)
            assert found == hash(tuple(tokens[: (i + 1) * stride])), f"group {g}: entry {i} is not this sequence's"

    def _write(self, g, table, tokens, entries: range, per_page: int, stride: int) -> None:
        for i in entries:
            note = hash(tuple(tokens[: (i + 1) * stride]))
            self.pages.setdefault((g, table[i // per_page]), {})[i % per_page] = note

    def _step_state(self, g, table, tokens, start: int) -> None:
        before = self.pages.get((g, table[0]), {}).get(0, ())
        # inputs of a window that is open can be forgotten, whatever else a state has seen cannot
        earliest = max(part.earliest(len(before)) for part in self.cache.groups[g].parts)
        assert not start or before[:start] == tuple(tokens[:start]), f"group {g}: the state is another sequence's"
        assert not start or len(before) == start or earliest <= start, f"group {g}: the state has seen what was cut off"
        self.pages[g, table[0]] = {0: tuple(tokens)}

    def copy_pages(self, copies) -> None:
        """Makes pages copies of others, as the storage does."""
        for g, source, destination in copies:
            self.pages[g, destination] = dict(self.pages.get((g, source), {}))

    def is_whole(self, request) -> bool:
        """Whether every page that the request's next token reads is there; a quick look, without contents."""
        tables = self.cache.tables[request.request_id]
        return all(
            len(table) >= table_pages(group.retention, group.block_size, request.num_computed)
            for group, table in zip(self.cache.groups, tables, strict=True)
        )


class LateCopier:
    """Copies that happen when a random number says so, in any order; `sure`: at once."""

    def __init__(self, memory: Memory, rng, sure: bool = False) -> None:
        self.contents, self.rng, self.sure = memory, rng, sure
        self.under_way: list[tuple[object, list, bool]] = []
        self.bytes: dict[tuple[int, int], bytearray] = {}

    def start(self, moves, down: bool) -> object:
        ticket = object()
        self.under_way.append((ticket, list(moves), down))
        if self.sure:
            self.run(ticket)
        return ticket

    def done(self, ticket: object) -> bool:
        return all(ticket is not other for other, _, _ in self.under_way)

    def wait(self, ticket: object) -> None:
        if not self.done(ticket):
            self.run(ticket)

    def memory(self, group: int, slot: int) -> memoryview:
        return memoryview(self.bytes.setdefault((group, slot), bytearray(8)))

    def tick(self) -> None:
        """Some of what is under way happens now."""
        for ticket, _, _ in self.rng.sample(self.under_way, len(self.under_way)):
            if self.rng.random() < 0.4:
                self.run(ticket)

    def run(self, ticket: object) -> None:
        """The ticket's copies happen now."""
        [(_, moves, down)] = [entry for entry in self.under_way if entry[0] is ticket]
        self.under_way = [entry for entry in self.under_way if entry[0] is not ticket]
        pages, slots = self.contents.pages, self.contents.slots
        for g, page, slot in moves:
            if down:
                slots[g, slot] = dict(pages.get((g, page), {}))
            else:
                pages[g, page] = dict(slots.get((g, slot), {}))
