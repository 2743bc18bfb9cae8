"""Sequences that are saved whole: at their end, and at checkpoints on their way.

Windows have given their older pages back, and a state is that of one length. So of models that have either, a length is
saved with all that going on from there needs: the pages that are kept from the first on, the window's last ones, the
state. Pages that are full are named by the tokens up to their end and lie there once, however many lengths need them;
what is of one length alone, a state or a page that is half full, is named by that length. Groups of tokens that close
(`kvlab.specs.grouped`) are written again after their page is full: such pages are of one length too.

What was saved of a sequence also tells later ones where they leave it: see `Ends.known`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvlab.cache.pins import Page
from kvlab.cache.tiers.keys import page_name
from kvlab.cache.tiers.saved import Entry, SavedPages
from kvlab.cache.tiers.snapshot import Snapshot
from kvlab.specs.layout import Group

Placed = tuple[Entry, int]
"""(its place in host memory, page)."""


@dataclass(frozen=True)
class End:
    """A length of a sequence that was saved whole.

    Attributes:
        holdings: of the sequence.
        units: the digest of each of its whole units of tokens: of all tokens up to the unit's end.
    """

    holdings: Snapshot
    units: tuple[bytes, ...]


class Ends:
    """What is saved whole, by the digest of its tokens.

    Args:
        groups: of the cache. unit: tokens at whose multiples the pages of all groups end. saved: where the pages are.
    """

    def __init__(self, groups: Sequence[Group], unit: int, saved: SavedPages) -> None:
        self.saved, self.unit = saved, unit
        self._sizes = [group.block_size for group in groups]
        closes = any(part.kind == "closed" for group in groups for part in group.parts)
        self._shares = [not closes and group.retention.rule != "state" for group in groups]
        # the pages of a unit that lie there once: group, place in the unit
        self._places = [(g, i) for g, size in enumerate(self._sizes) if self._shares[g] for i in range(unit // size)]
        self._ends: dict[bytes, End] = {}
        # how many ends have each unit
        self._units: Counter[bytes] = Counter()
        self._sweep_at = 0
        for name, note in saved.disk.notes() if saved.disk else ():
            if (end := _from_note(note)) is not None:
                self._enter(name, end)

    def __len__(self) -> int:
        return len(self._ends)

    def lengths(self) -> set[int]:
        """The lengths of all that is saved."""
        return {end.holdings.computed for end in self._ends.values()}

    def get(self, digest: bytes, tokens: int) -> End | None:
        """What is saved under that digest, if it is of that length."""
        end = self._ends.get(digest)
        return end if end is not None and end.holdings.computed == tokens else None

    def known(self, digests: Iterable[bytes]) -> int:
        """How many of these units, in order, something that was saved began with."""
        count = 0
        for digest in digests:
            if digest not in self._units:
                break
            count += 1
        return count

    def names(self, digest: bytes, end: End) -> Iterator[bytes]:
        """The name of each of its pages, by group and position."""
        for g, (_, held) in enumerate(end.holdings.tables):
            for i in held:
                unit, inside = divmod(i * self._sizes[g], self.unit)
                if self._shares[g] and unit < len(end.units):
                    yield page_name(end.units[unit], g, inside // self._sizes[g])
                else:
                    yield page_name(digest, g, i)

    def add(self, digest: bytes, end: End, pages: Sequence[Page]) -> list[Placed]:
        """Those of `pages`, in the order of `names`, that are not saved yet, with places in host memory; [] when there
        are none, or no place for one: a part serves nobody."""
        names = list(self.names(digest, end))
        if digest in self._ends and all(map(self.saved.has, names)):
            return []
        # what is there already must not make way for the rest
        there = [entry for name in names if (entry := self.saved.entry(name))]
        self.saved.pin(there)
        new: list[Placed] = []
        complete = True
        for name, (g, page) in zip(names, pages, strict=True):
            if self.saved.has(name):
                continue
            entry = self.saved.add(name, g)
            if entry is None:
                complete = False
                break
            new.append((entry, page))
        self.saved.unpin(there)
        if not complete:
            for added, _ in new:
                self.saved.drop(added.name)
            return []
        self._enter(digest, end)
        if self.saved.disk:
            self.saved.disk.write(digest, memoryview(b""), _to_note(end))
        self._sweep()
        return new

    def _enter(self, digest: bytes, end: End) -> None:
        self._leave(digest)
        self._ends[digest] = end
        self._units.update(end.units)

    def _leave(self, digest: bytes) -> None:
        if end := self._ends.pop(digest, None):
            for unit in end.units:
                self._units[unit] -= 1
                if not self._units[unit]:
                    del self._units[unit]

    def _sweep(self) -> None:
        """Forgets, now and then, the ends whose pages are gone."""
        if len(self._ends) <= max(self._sweep_at, 16 + 2 * self.saved.num_pages):
            return
        for digest, end in list(self._ends.items()):
            if not all(map(self.saved.has, self.names(digest, end))):
                self.forget(digest)
        # ends that share all their pages may be more than pages
        self._sweep_at = 2 * len(self._ends)

    def forget(self, digest: bytes) -> None:
        """Finds it no more, here and after a restart; what was of this length alone goes with it."""
        if end := self._ends.get(digest):
            shared = {page_name(unit, g, i) for unit in end.units for g, i in self._places}
            self.saved.discard(name for name in self.names(digest, end) if name not in shared)
        self._unname(digest)

    def _unname(self, digest: bytes) -> None:
        self._leave(digest)
        if self.saved.disk:
            self.saved.disk.forget(digest)

    def expel(self, digests: dict[int, bytes]) -> list[bytes]:
        """The names of all pages that a request could have read whose tokens have these digests by length, every whole
        unit's among them; the ends that had them are forgotten.

        Those are the ends that it contains, and longer ones that begin with the same unit of tokens.
        """
        first = digests.get(self.unit)
        # a page may outlast the ends that had it
        names = [page_name(digests[n], g, i) for n in digests if not n % self.unit for g, i in self._places]
        for digest, end in list(self._ends.items()):
            if (end.units and end.units[0] == first) or digests.get(end.holdings.computed) == digest:
                names += self.names(digest, end)
                self._unname(digest)
        return list(dict.fromkeys(names))


def _to_note(end: End) -> str:
    return json.dumps([end.holdings.computed, end.holdings.tables, b"".join(end.units).hex()])


def _from_note(note: str) -> End | None:
    try:
        computed, tables, units = json.loads(note)
        holdings = Snapshot(int(computed), tuple((int(n), tuple(map(int, held))) for n, held in tables))
        digests = bytes.fromhex(units)
        return End(holdings, tuple(digests[i : i + 32] for i in range(0, len(digests), 32)))
    except (ValueError, TypeError):
        return None
