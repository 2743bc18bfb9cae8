"""The links of the hash chain, kept in runs: what one request put in behind one link, as lists that grow and shrink
at their end. What is asked of many links at once is then one comparison or one slice, without a step for each link.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvlab.cache.prefix.keys import History


class Link(NamedTuple):
    """The last unit of one history, to look at. `before`: the digest of the link before it, b"" for the first."""

    digest: bytes
    before: bytes
    tokens: bytes
    extra: bytes
    pages: tuple[int, ...]


class LinkRun:
    """Links one behind the other, `start` units before the first.

    A link is gone only when nothing is behind it, so a run loses links at its end alone.

    Attributes:
        before: the run whose link of unit start - 1 the first one continues; None at the root.
        digests, extras: of each link. tokens: the bytes of all links' tokens, `width` for each link.
        pages: of each column, the page of each link, 0 where there is none.
        whole: no page is missing, or ever was; False: one may be.
        users: by number of units, the requests that stand behind so many, and the runs that continue there.
    """

    __slots__ = ("before", "digests", "extras", "pages", "start", "tokens", "users", "whole", "width")

    def __init__(self, start: int, before: LinkRun | None, columns: int, width: int) -> None:
        self.start, self.before, self.width = start, before, width
        self.digests: list[bytes] = []
        self.tokens = bytearray()
        self.extras: list[bytes] = []
        self.pages = [array("i") for _ in range(columns)]
        self.users: dict[int, int] = {}
        self.whole = True

    @property
    def end(self) -> int:
        """Units up to the end of the last link."""
        return self.start + len(self.digests)

    def append(self, history: History, first: int, last: int, pages: Sequence[array[int]]) -> None:
        """Adds the links of the history's units first .. last - 1."""
        self.digests += history.digests[first:last]
        self.tokens += history.token_bytes(first, last)
        self.extras += history.extras(first, last)
        for column, own in zip(self.pages, pages, strict=True):
            column += own

    def cut(self, count: int) -> list[bytes]:
        """The digests of the links that are gone now that only the first `count` are left."""
        gone = self.digests[count:]
        del self.tokens[count * self.width :]
        for part in (self.digests, self.extras, *self.pages):
            del part[count:]
        return gone

    def common(self, before: LinkRun | None, history: History, first: int, last: int) -> int:
        """How many of the history's units first .. last - 1 are links of this run, when `before` has the unit before.

        0 when the history came here by another way: its digest is another history's too.
        """
        at = first - self.start
        if not (before is self and at > 0) and not (at == 0 and before is self.before):
            return 0
        count = history.num_equal(first, last, self.tokens, at)
        mine, theirs = self.extras[at : at + count], history.extras(first, first + count)
        if mine == theirs:
            return count
        return next(i for i in range(count) if mine[i] != theirs[i])

    def pages_from(self, units: int, count: int) -> list[array[int]]:
        """Of each column, the pages of the `count` links from unit `units` on."""
        at = units - self.start
        return [column[at : at + count] for column in self.pages]

    def enter(self, units: int) -> None:
        """Somebody stands, or continues, behind the first `units` units."""
        self.users[units] = self.users.get(units, 0) + 1

    def leave(self, units: int) -> None:
        """Somebody who was behind the first `units` units is no longer there."""
        self.users[units] -= 1
        if not self.users[units]:
            del self.users[units]

    def num_needed(self) -> int:
        """Links up to the last one that has a page, or somebody behind it."""
        count = len(self.digests)
        if any(column[-1] for column in self.pages if column):
            return count
        used = max(self.users, default=self.start) - self.start
        for row in zip(*map(reversed, self.pages), strict=True):
            if count == used or any(row):
                break
            count -= 1
        return count

    def links(self) -> Iterator[Link]:
        """The links, first to last."""
        before = self.before.digests[self.start - 1 - self.before.start] if self.before else b""
        for i, (digest, extra, *pages) in enumerate(zip(self.digests, self.extras, *self.pages, strict=True)):
            tokens = bytes(self.tokens[i * self.width : (i + 1) * self.width])
            yield Link(digest, before, tokens, extra, tuple(pages))
            before = digest

    def check(self) -> None:
        """Asserts that the run is whole: lists of one length, an end that is needed, users behind links that are there.

        Raises:
            AssertionError: what is wrong.
        """
        lengths = {len(self.tokens) / self.width, *map(len, (self.digests, self.extras, *self.pages))}
        assert len(lengths) == 1 and self.digests, "a run has lists of several lengths, or no links"
        assert not (self.whole and any(0 in pages for pages in self.pages)), "a whole run lacks a page"
        assert self.num_needed() == len(self.digests), "a link without pages, and nobody behind it or on it"
        assert all(self.start < units <= self.end and n > 0 for units, n in self.users.items()), "users of no link"
        assert (self.before is None) == (self.start == 0), "a run begins at the root, or behind another"


class LinkPath:
    """The runs of a known history, first to last; each is followed to where the next one begins, `units` in all."""

    __slots__ = ("runs", "units")

    def __init__(self, runs: list[LinkRun], units: int) -> None:
        self.runs, self.units = runs, units

    def run_at(self, units: int) -> LinkRun | None:
        """The run that has the last of the first `units` units; None for none."""
        return next((run for run in reversed(self.runs) if run.start < units), None)

    @property
    def whole(self) -> bool:
        """Whether no page of any column is missing, or ever was."""
        return all(run.whole for run in self.runs)

    def pages(self, column: int) -> array[int]:
        """The page of each unit in that column, 0 where there is none."""
        found = array("i")
        for run in self.runs:
            del found[run.start :]
            found += run.pages[column]
        return found[: self.units]


def num_new(digests: Sequence[bytes], known: Mapping[bytes, LinkRun]) -> int:
    """How many of the first `digests` are neither known nor twice among them."""
    seen: set[bytes] = set()
    for count, digest in enumerate(digests):
        if digest in known or digest in seen:
            return count
        seen.add(digest)
    return len(digests)
