"""Which saved pages a request can begin with, and which pages of a request that ends are worth saving.

Where every group keeps all entries, a page depends on the tokens up to its end and nothing else: pages are saved one by
one, and a request begins with as many as there are. Windows have given their older pages back, and a state is that of
one length: of such models the end of a sequence is saved whole, and only a request that contains all of it can use it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvlab.cache.manager import KVCacheManager
from kvlab.cache.tiers.keys import page_name, prefix_digests, root_digest
from kvlab.cache.tiers.saved import Entry, SavedPages
from kvlab.cache.tiers.snapshot import Snapshot, snapshot

Placed = tuple[Entry, int]
"""(its place in host memory, page)."""


@dataclass(frozen=True)
class End:
    """The end of a sequence that was saved whole.

    Attributes:
        holdings: of the sequence.
        first: the digest of its first unit of tokens; b"" when it is shorter than that.
    """

    holdings: Snapshot
    first: bytes


@dataclass
class Found:
    """Saved tokens: what a request holds of them, and for each of its pages the entry with its bytes.

    `sources`: by "host" and "disk", the tokens that were found there, and their entries.
    `start`: the tokens before those that were found. The request has them from the pool.
    """

    holdings: Snapshot
    entries: list[Entry]
    sources: dict[str, tuple[int, list[Entry]]]
    start: int = 0

    @property
    def tokens(self) -> int:
        """How many, those before the found ones included."""
        return self.holdings.computed


class Finder:
    """Names and finds saved pages, for the pools of one cache."""

    def __init__(self, cache: KVCacheManager, saved: SavedPages, fingerprint: bytes) -> None:
        self.cache, self.saved, self.fingerprint = cache, saved, fingerprint
        self._by_page = all(group.retention.rule == "all" for group in cache.groups)
        # every group's pages end at multiples of this
        self._unit = math.lcm(*(group.block_size for group in cache.groups))
        # ends of sequences by the digest of their tokens
        self._ends: dict[bytes, End] = {}
        for name, note in saved.disk.notes() if saved.disk else ():
            if (end := _from_note(note)) is not None:
                self._ends[name] = end
        self.lost: list[str] = []

    # saving

    def to_save(self, request) -> list[Placed]:
        """The pages of a request that are not saved yet, with places for them in host memory."""
        # drafts that were right behind the token that ended it count as computed, and are no part of it
        return self._pages_to_save(request) if self._by_page else self._end_to_save(request)

    def _pages_to_save(self, request) -> list[Placed]:
        computed, tables = min(request.num_computed, len(request.tokens)), self.cache.tables[request.request_id]
        digests = self._digests(request, self._page_ends(computed // self._unit * self._unit))
        new: list[Placed] = []
        for name, g, end in self._page_names(digests):
            if self.saved.has(name):
                continue
            entry = self.saved.add(name, g)
            if entry is None:
                break
            new.append((entry, tables[g][end // self.cache.groups[g].block_size - 1]))
        return new

    def _page_names(self, digests: dict[int, bytes]) -> list[tuple[bytes, int, int]]:
        """(name, group, end) of the pages that are complete at these lengths, the first tokens' first."""
        sizes = [group.block_size for group in self.cache.groups]
        return [(page_name(digests[end], g), g, end) for end in sorted(digests)
                for g, size in enumerate(sizes) if not end % size]  # fmt: skip

    def _end_to_save(self, request) -> list[Placed]:
        computed = request.num_computed
        if not 0 < computed <= len(request.tokens):
            return []
        holdings, pages = snapshot(self.cache, request.request_id)
        pages = pages[: sum(len(held) for _, held in holdings.tables)]
        holdings = Snapshot(computed, holdings.tables)
        first = self._unit if computed >= self._unit else computed
        digests = self._digests(request, [first, computed])
        digest, end = digests[computed], End(holdings, digests[first] if first == self._unit else b"")
        names = _names(digest, holdings)
        if digest in self._ends and all(map(self.saved.has, names)):
            return []
        new: list[Placed] = []
        for name, (g, page) in zip(names, pages, strict=True):
            if self.saved.entry(name) is None:
                entry = self.saved.add(name, g)
                if entry is None:
                    # a part of a sequence's end serves nobody
                    for added, _ in new:
                        self.saved.drop(added.name)
                    return []
                new.append((entry, page))
        self._ends[digest] = end
        if self.saved.disk:
            self.saved.disk.write(digest, memoryview(b""), _to_note(end))
        # each end has a page of its own at least: more ends than pages are ends whose pages are gone
        if len(self._ends) > 16 + 2 * self.saved.num_pages:
            self._sweep()
        return new

    def _sweep(self) -> None:
        for digest, end in list(self._ends.items()):
            if not all(map(self.saved.has, _names(digest, end.holdings))):
                self._forget_end(digest)

    def _forget_end(self, digest: bytes) -> None:
        del self._ends[digest]
        if self.saved.disk:
            self.saved.disk.forget(digest)

    def expel(self, request) -> int:
        """How many saved pages were there that the request could have read; nobody finds them any more.

        Those are the pages of its tokens, and of the ends of sequences that it contains. Of longer sequences it shares
        pages with those that begin with the same unit of tokens, and their ends contain these: they go too.
        """
        tokens = len(request.tokens)
        if self._by_page:
            digests = self._digests(request, self._page_ends(tokens))
            return self.saved.expel(name for name, _, _ in self._page_names(digests))
        lengths = {end.holdings.computed for end in self._ends.values()} | {self._unit}
        digests = self._digests(request, [n for n in lengths if n <= tokens])
        first, names = digests.get(self._unit), []
        for digest, end in list(self._ends.items()):
            if end.first == first or digests.get(end.holdings.computed) == digest:
                names += _names(digest, end.holdings)
                self._forget_end(digest)
        return self.saved.expel(names)

    # finding

    def find(self, request, above: int) -> Found | None:
        """See `Tiers.find`."""
        # the last token is always computed: what follows it is picked from it
        limit = len(request.tokens) - 1
        return self._find_pages(request, limit, above) if self._by_page else self._find_end(request, limit, above)

    def _find_pages(self, request, limit: int, above: int) -> Found | None:
        unit = self._unit
        # what the pool has is not moved
        tokens = start = above // unit * unit
        digests = self._digests(request, self._page_ends(limit // unit * unit))
        # and is in use nonetheless: once the pool has it no more, it is looked for here
        had = self._page_names({end: digest for end, digest in digests.items() if end <= start})
        self._touch(name for name, _, _ in reversed(had))
        entries: list[list[Entry]] = [[] for _ in self.cache.groups]
        sources: dict[str, tuple[list[int], list[Entry]]] = {}  # by tier: tokens of each unit, entries
        for end in range(start + unit, limit + 1, unit):
            before = self.saved.reads
            taken = self._fetch_unit(digests, end)
            if taken is None:
                break
            counted, own = sources.setdefault(self._source(before), ([], []))
            counted.append(unit)
            own += [entry for new in taken for entry in new]
            for own, new in zip(entries, taken, strict=True):
                own += new
            tokens = end
        found = [entry for own in entries for entry in own]
        if tokens <= above:
            self.saved.unpin(found)
            return None
        sizes = [group.block_size for group in self.cache.groups]
        where = {source: (sum(counted), own) for source, (counted, own) in sources.items()}
        tables = tuple((tokens // size, tuple(range(start // size, tokens // size))) for size in sizes)
        return Found(Snapshot(tokens, tables), found, where, start)

    def _touch(self, names: Iterable[bytes]) -> None:
        """These pages are the last to go from now on, wherever they are."""
        for name in names:
            self.saved.entry(name)

    def _source(self, reads: int) -> str:
        """Where pages came from that were fetched since so many had been read from disk."""
        return "disk" if self.saved.reads > reads else "host"

    def _fetch_unit(self, digests: dict[int, bytes], end: int) -> list[list[Entry]] | None:
        """The pinned entries of each group's pages in the unit that ends at `end`, None when one is missing."""
        taken: list[list[Entry]] = []
        for g, group in enumerate(self.cache.groups):
            ends = range(end - self._unit + group.block_size, end + 1, group.block_size)
            taken.append([])
            for at in ends:
                entry = self._fetch(page_name(digests[at], g), g)
                if entry is None:
                    self.saved.unpin(e for own in taken for e in own)
                    return None
                taken[-1].append(entry)
        return taken

    def _find_end(self, request, limit: int, above: int) -> Found | None:
        lengths = {n for end in self._ends.values() if (n := end.holdings.computed) <= limit}
        digests = self._digests(request, lengths)
        for tokens in sorted(lengths, reverse=True):
            end = self._ends.get(digests[tokens])
            if end is None or end.holdings.computed != tokens:
                continue
            holdings = end.holdings
            if tokens <= above:
                # the pool has as many; in use nonetheless
                self._touch([*_names(digests[tokens], holdings), digests[tokens]])
                return None
            entries: list[Entry] = []
            before = self.saved.reads
            groups = [g for g, (_, held) in enumerate(holdings.tables) for _ in held]
            for name, g in zip(_names(digests[tokens], holdings), groups, strict=True):
                entry = self._fetch(name, g)
                if entry is None:
                    # one that is still on its way, or has no place in host memory now, will do another time
                    if not self.saved.has(name):
                        self._forget_end(digests[tokens])
                    break
                entries.append(entry)
            else:
                if self.saved.disk:
                    # its note is as recently used as its pages
                    self.saved.disk.read(digests[tokens], memoryview(bytearray()))
                return self._with_kept(holdings, entries, self._source(before))
            self.saved.unpin(entries)
        return None

    def _with_kept(self, holdings: Snapshot, entries: list[Entry], source: str) -> Found:
        """What was found; its states also as kept ones, where steps back were promised and nothing earlier is there."""
        every = self.cache.rollback.checkpoint_tokens
        if not self.cache.keeps_states or not every or holdings.computed < every:
            return Found(holdings, entries, {source: (holdings.computed, entries)})
        states = [entry for entry in entries if entry.group in self.cache.kept.pools]
        for entry in states:
            entry.pins += 1
        kept = Snapshot(holdings.computed, holdings.tables, (holdings.computed,))
        return Found(kept, entries + states, {source: (holdings.computed, entries + states)})

    def _fetch(self, name: bytes, group: int) -> Entry | None:
        """The page in host memory, pinned."""
        known = self.saved.has(name)
        entry = self.saved.fetch(name, group)
        if entry is None or not entry.ready:
            if known and not self.saved.has(name):
                self.lost.append(f"saved page of group {self.cache.groups[group].name} cannot be read")
            return None
        entry.pins += 1
        return entry

    def _page_ends(self, tokens: int) -> set[int]:
        sizes = {group.block_size for group in self.cache.groups}
        return {end for size in sizes for end in range(size, tokens + 1, size)}

    def _digests(self, request, ends: Iterable[int]) -> dict[int, bytes]:
        return prefix_digests(root_digest(self.fingerprint, request), request.tokens, ends)


def _names(digest: bytes, holdings: Snapshot) -> list[bytes]:
    return [page_name(digest, g, i) for g, (_, held) in enumerate(holdings.tables) for i in held]


def _to_note(end: End) -> str:
    return json.dumps([end.holdings.computed, end.holdings.tables, end.first.hex()])


def _from_note(note: str) -> End | None:
    try:
        computed, tables, first = json.loads(note)
        holdings = Snapshot(int(computed), tuple((int(n), tuple(map(int, held))) for n, held in tables))
        return End(holdings, bytes.fromhex(first))
    except (ValueError, TypeError):
        return None
