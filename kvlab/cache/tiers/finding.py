"""Which saved pages a request can begin with, and which pages of a request are worth saving.

Where every group keeps all entries, a page depends on the tokens up to its end and nothing else: pages are saved one by
one when their request ends, and a request begins with as many as there are. Of models with windows, chunks or states,
lengths are saved whole (`ends.py`): the end of a request, and the checkpoints on its way that `marks.py` names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvlab.cache.manager import KVCacheManager
from kvlab.cache.prefix.rules import unit_tokens
from kvlab.cache.tiers.ends import End, Ends, Placed
from kvlab.cache.tiers.keys import page_name, prefix_digests, root_digest
from kvlab.cache.tiers.marks import Marks
from kvlab.cache.tiers.saved import Entry, SavedPages
from kvlab.cache.tiers.snapshot import Snapshot, holdings_at, snapshot


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

    @property
    def reading(self) -> bool:
        """Whether any of it is still on its way from the disk."""
        return any(entry.reading for entry in self.entries)

    @property
    def broken(self) -> bool:
        """Whether any of it is not to be had any more: it could not be read, or was expelled."""
        return any(entry.failed or entry.expelled for entry in self.entries)


class Finder:
    """Names and finds saved pages, for the pools of one cache."""

    def __init__(self, cache: KVCacheManager, saved: SavedPages, fingerprint: bytes) -> None:
        self.cache, self.saved, self.fingerprint = cache, saved, fingerprint
        self._unit = unit_tokens(cache.groups)
        by_page = all(group.retention.rule == "all" for group in cache.groups)
        self._ends = None if by_page else Ends(cache.groups, self._unit, saved)
        self.marks = None if by_page else Marks(cache, self._unit)

    # saving

    def to_save(self, request) -> list[Placed]:
        """The pages of a request that are not saved yet, with places for them in host memory."""
        # drafts that were right behind the token that ended it count as computed, and are no part of it
        return self._pages_to_save(request) if self._ends is None else self._end_to_save(request, self._ends)

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

    def _end_to_save(self, request, ends: Ends) -> list[Placed]:
        computed = request.num_computed
        if not 0 < computed <= len(request.tokens):
            return []
        holdings, pages = snapshot(self.cache, request.request_id)
        # who begins here steps back no further, so kept states stay behind
        pages = pages[: sum(len(held) for _, held in holdings.tables)]
        return self._whole(request, ends, Snapshot(computed, holdings.tables), pages)

    def checkpoint_to_save(self, request) -> list[Placed]:
        """As `to_save`, for a request that goes on: what it holds after its computed tokens, if that is a length to save.
        To be called before pages behind windows are given back."""
        ends, marks, name, tokens = self._ends, self.marks, request.request_id, request.num_computed
        if ends is None or marks is None or marks.next_after(name, tokens - 1, request.num_prompt) != tokens:
            return []
        found = holdings_at(self.cache, name, tokens)
        return self._whole(request, ends, *found) if found else []

    def _whole(self, request, ends: Ends, holdings: Snapshot, pages: list) -> list[Placed]:
        tokens, unit = holdings.computed, self._unit
        digests = self._digests(request, {*range(unit, tokens + 1, unit), tokens})
        units = tuple(digests[n] for n in range(unit, tokens + 1, unit))
        return ends.add(digests[tokens], End(holdings, units), pages)

    def expel(self, request) -> int:
        """How many saved pages were there that the request could have read; nobody finds them any more.

        Those are the pages of its tokens, and of the ends of sequences that it contains. Of longer sequences it shares
        pages with those that begin with the same unit of tokens, and their ends contain these: they go too.
        """
        tokens, unit = len(request.tokens), self._unit
        if self._ends is None:
            digests = self._digests(request, self._page_ends(tokens))
            return self.saved.expel(name for name, _, _ in self._page_names(digests))
        lengths = {*range(unit, tokens + 1, unit), *(n for n in self._ends.lengths() if n <= tokens)}
        return self.saved.expel(self._ends.expel(self._digests(request, lengths)))

    # finding

    def find(self, request, above: int) -> Found | None:
        """See `Tiers.find`."""
        # the last token is always computed: what follows it is picked from it
        limit = len(request.tokens) - 1
        if self._ends is None or self.marks is None:
            return self._find_pages(request, limit, above)
        found = self._find_end(request, self._ends, limit, above)
        known = self._known(request, self._ends, limit)
        if known > max(above, found.tokens if found else 0):
            self.marks.leaves(request.request_id, known)
        return found

    def _known(self, request, ends: Ends, limit: int) -> int:
        """Tokens of the request that something that was saved began with, whether or not it can go on from there."""
        if not ends:
            return 0
        lengths = range(self._unit, limit + 1, self._unit)
        digests = self._digests(request, lengths)
        return ends.known(digests[n] for n in lengths) * self._unit

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
            taken = self._fetch_unit(digests, end)
            if taken is None:
                break
            flat = [entry for new in taken for entry in new]
            counted, own = sources.setdefault(_source(flat), ([], []))
            counted.append(unit)
            own += flat
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

    def _find_end(self, request, ends: Ends, limit: int, above: int) -> Found | None:
        lengths = {n for n in ends.lengths() if n <= limit}
        digests = self._digests(request, lengths)
        for tokens in sorted(lengths, reverse=True):
            digest = digests[tokens]
            end = ends.get(digest, tokens)
            if end is None:
                continue
            names = list(ends.names(digest, end))
            if tokens <= above:
                # the pool has as many; in use nonetheless
                self._touch([*names, digest])
                return None
            entries = self._fetch_end(names, end)
            if entries is not None:
                if self.saved.disk:
                    # its note is as recently used as its pages
                    self.saved.disk.read(digest, memoryview(bytearray()))
                return self._with_kept(end.holdings, entries)
            # one that is still on its way, or has no place in host memory now, will do another time
            if not all(map(self.saved.has, names)):
                ends.forget(digest)
        return None

    def _fetch_end(self, names: list[bytes], end: End) -> list[Entry] | None:
        """The pinned entries of all its pages, None when one is missing."""
        entries: list[Entry] = []
        groups = [g for g, (_, held) in enumerate(end.holdings.tables) for _ in held]
        for name, g in zip(names, groups, strict=True):
            entry = self._fetch(name, g)
            if entry is None:
                self.saved.unpin(entries)
                return None
            entries.append(entry)
        return entries

    def _with_kept(self, holdings: Snapshot, entries: list[Entry]) -> Found:
        """What was found; its states also as kept ones, where steps back were promised and nothing earlier is there."""
        every, source = self.cache.rollback.checkpoint_tokens, _source(entries)
        if not self.cache.keeps_states or not every or holdings.computed < every:
            return Found(holdings, entries, {source: (holdings.computed, entries)})
        states = [entry for entry in entries if entry.group in self.cache.kept.pools]
        self.saved.pin(states)
        kept = Snapshot(holdings.computed, holdings.tables, (holdings.computed,))
        return Found(kept, entries + states, {source: (holdings.computed, entries + states)})

    def _fetch(self, name: bytes, group: int) -> Entry | None:
        """The page in host memory or on its way there from the disk, pinned."""
        entry = self.saved.fetch(name, group)
        if entry is None or not (entry.ready or entry.reading):
            return None
        self.saved.pin([entry])
        return entry

    def _page_ends(self, tokens: int) -> set[int]:
        sizes = {group.block_size for group in self.cache.groups}
        return {end for size in sizes for end in range(size, tokens + 1, size)}

    def _digests(self, request, ends: Iterable[int]) -> dict[int, bytes]:
        return prefix_digests(root_digest(self.fingerprint, request), request.tokens, ends)


def _source(entries: Iterable[Entry]) -> str:
    """Where pages came from, or come from."""
    return "disk" if any(entry.fresh for entry in entries) else "host"
