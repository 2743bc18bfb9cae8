"""What a request holds of the pool, so that it can be rebuilt elsewhere: which table entries have a page, which states
were kept. The bytes travel apart, a page at a time."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from kvlab.cache.manager import KVCacheManager
from kvlab.cache.pins import Page
from kvlab.cache.pool import NULL_BLOCK
from kvlab.specs.pages import dead_pages, table_pages


@dataclass(frozen=True)
class Snapshot:
    """The holdings of a request after `computed` tokens.

    Attributes:
        computed: tokens that are certain.
        tables: for each group, the entries of its table, and the indices of those that hold a page.
        kept: the lengths after which its states were kept, oldest first.
    """

    computed: int
    tables: tuple[tuple[int, tuple[int, ...]], ...]
    kept: tuple[int, ...] = ()


def snapshot(cache: KVCacheManager, request_id: str) -> tuple[Snapshot, list[Page]]:
    """(what the request holds for its computed tokens, its pages: by group and position, then the kept states').

    Pages that it has for tokens of a step to come are left out.
    """
    computed, tables, pages = cache.computed[request_id], [], []
    for g, (group, table) in enumerate(zip(cache.groups, cache.tables[request_id], strict=True)):
        entries = table_pages(group.retention, group.block_size, computed)
        held = tuple(i for i in range(entries) if table[i] != NULL_BLOCK)
        tables.append((entries, held))
        pages += [(g, table[i]) for i in held]
    lengths = cache.kept.lengths(request_id)
    kept = tuple(n for n in lengths if n <= computed)
    states = list(cache.kept.pages(request_id))
    pages += states[: len(kept) * len(cache.kept.pools)]
    return Snapshot(computed, tuple(tables), kept), pages


def holdings_at(cache: KVCacheManager, request_id: str, tokens: int) -> tuple[Snapshot, list[Page]] | None:
    """As `snapshot`, for a length that the request has just reached and before anything was given back: what a sequence
    that ended there would hold. Its states are the copies that were made of them; None when there was no room for one.
    """
    states = cache.kept.newest(request_id, tokens) or cache.snapshots.newest(request_id, tokens)
    if len(states) < len(cache.kept.pools):
        return None
    tables, pages = [], []
    for g, (group, table) in enumerate(zip(cache.groups, cache.tables[request_id], strict=True)):
        entries = table_pages(group.retention, group.block_size, tokens)
        dead = dead_pages(group.retention, group.block_size, max(0, tokens - cache.rollback.slack))
        held = tuple(i for i in range(entries) if i not in dead and table[i] != NULL_BLOCK)
        tables.append((entries, held))
        pages += [(g, states.get(g, table[i])) for i in held]
    return Snapshot(tokens, tuple(tables)), pages


def restore(cache: KVCacheManager, request_id: str, holdings: Snapshot) -> list[Page]:
    """The pages, in the order of `snapshot`, that the request holds from now on; what is in them is the caller's.

    The caller has made sure that they fit.
    """
    counts = [len(held) for _, held in holdings.tables]
    for g in cache.kept.pools:
        counts[g] += len(holdings.kept)
    cache.make_room(counts)
    tables, pages = [], []
    for g, (entries, held) in enumerate(holdings.tables):
        table = array("i", [NULL_BLOCK]) * entries
        for i, page in zip(held, cache.pools[g].allocate(len(held)), strict=True):
            table[i] = page
            pages.append((g, page))
        tables.append(table)
    cache.tables[request_id] = tuple(tables)
    cache.computed[request_id] = holdings.computed
    cache._cleared[request_id] = [_cleared(cache, g, table) for g, table in enumerate(tables)]
    for tokens in holdings.kept:
        cache.kept.take(request_id, tokens)
    return pages + list(cache.kept.pages(request_id))


def _cleared(cache: KVCacheManager, g: int, table: array[int]) -> int:
    """The first table entry behind the sinks that was not given back, 0 when none was."""
    group = cache.groups[g]
    dead = dead_pages(group.retention, group.block_size, len(table) * group.block_size)
    gone = [i for i in range(dead.start, len(table)) if table[i] == NULL_BLOCK]
    return gone[-1] + 1 if gone else 0
