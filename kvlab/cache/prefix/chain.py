"""The hash chain: a dict from the digest of a whole history to the link that carries its last unit.

    digest of unit i = sha256(digest of unit i - 1, token bytes of unit i, extra keys of unit i)

A link also has its tokens, its extra keys and the link before it. A hit compares all three, so by induction the whole
history is compared: two histories of equal digests never share a page, they cost the second one its place.
A link without pages stays as long as links behind it have some, or a request stands on it.

Links that one request put in, one behind the other, lie in a run (`kvlab.cache.prefix.links`): the dict leads to the
run, and how many units are before the digest's own says which of its links it is.

Source: vLLM v1/core/kv_cache_utils.py (hash_block_tokens) and block_pool.py; it differs by comparing tokens, and by
having one page for one history: what a second request computed at the same time is given back for the first one's.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256

from kvlab.cache.prefix.index import Column, Handle, clear_page
from kvlab.cache.prefix.keys import History
from kvlab.cache.prefix.links import Link, LinkPath, LinkRun, num_new
from kvlab.cache.prefix.options import PrefixOptions, sha256_digest

ROOT_DIGEST = sha256(b"kvlab prefix cache, root of every history").digest()
"""The same in every process, so that caches of several can be compared: nobody can find two histories of one sha256."""
PROCESS_ROOT = os.urandom(len(ROOT_DIGEST))
"""Of any other function: who can find histories that collide cannot know the digests of a process, and so not aim."""


class HashChain:
    """The index as a hash chain; see `kvlab.cache.prefix.index`.

    Attributes:
        runs: by the digest of each of their links.
        collisions: times that a history could not be put in because another one has its digest.
    """

    def __init__(self, columns: Sequence[Column], options: PrefixOptions, size: int) -> None:
        self.columns, self._digest = tuple(columns), options.digest
        self._root = ROOT_DIGEST if options.digest is sha256_digest else PROCESS_ROOT
        self.runs: dict[bytes, LinkRun] = {}
        self.collisions = 0
        # of every page, the run that has it, and how many units are before it
        self._where: list[LinkRun | None] = [None] * size
        self._depth = [0] * size

    # finding

    def walk(self, history: History, units: int) -> LinkPath:
        """The longest known history, of at most `units` units, that `history` begins with."""
        self._extend(history, units)
        at, before, found = 0, None, []
        while at < units:
            run = self.runs.get(history.digests[at])
            same = run.common(before, history, at, units) if run else 0
            if not same:
                break
            at, before = at + same, run
            found.append(run)
        return LinkPath(found, at)

    def _extend(self, history: History, units: int) -> None:
        """Works out the digests of the first `units` units."""
        digests, digest = history.digests, self._digest
        first = len(digests)
        if units <= first:
            return
        parent, pieces = digests[-1] if digests else self._root, history.pieces(first, units)
        if digest is sha256_digest:
            # without a call of its own for each unit
            digests += [parent := sha256(parent + piece).digest() for piece in pieces]
        else:
            digests += [parent := digest(parent + piece) for piece in pieces]

    # standing

    def lock(self, history: History, path: LinkPath, units: int) -> Handle:
        """The place after the first `units` units of `path`."""
        handle = Handle(0, None)
        self._stand(handle, path.run_at(units), units)
        return handle

    def retreat(self, handle: Handle, history: History, units: int) -> None:
        """Moves the handle back behind the first `units` units."""
        run = handle.tail
        while run and run.start >= units:
            run = run.before
        self._stand(handle, run, units)

    def release(self, handle: Handle) -> None:
        """Forgets the handle."""
        self._stand(handle, None, 0)

    def _stand(self, handle: Handle, run: LinkRun | None, units: int) -> None:
        before, behind = handle.tail, handle.units
        handle.tail, handle.units = run, units
        if run:
            run.enter(units)
        if before:
            before.leave(behind)
            self._prune(before)

    # growing

    def insert(self, handle: Handle, history: History, pages: Sequence[array[int]]) -> list[array[int]]:
        """The pages that the index has of the handle's next units; see `PrefixIndex.insert`."""
        at, last, run = handle.units, handle.units + len(pages[0]), handle.tail
        self._extend(history, last)
        kept = [array("i") for _ in pages]
        while at < last:
            known, own = self.runs.get(history.digests[at]), [column[at - last :] for column in pages]
            if known is None:
                run = self._grown(run, history, at, own)
                own, count = run.pages_from(at, last - at), run.end - at
            else:
                count = known.common(run, history, at, last)
                if not count:
                    self.collisions += 1
                    handle.closed = True
                    break
                run = known
                self._fill(run, at, [column[:count] for column in own])
                own = run.pages_from(at, count)
            at += count
            for column, theirs in zip(kept, own, strict=True):
                column += theirs
        self._stand(handle, run, at)
        return kept

    def _grown(self, before: LinkRun | None, history: History, at: int, pages: list[array[int]]) -> LinkRun:
        """The run that has the history's links from unit `at` on: the one before them, when they lie at its end.

        It has as many as there are digests that lead nowhere else.
        """
        run = before if before and before.end == at else LinkRun(at, before, len(pages), history.width)
        if run is not before and before:
            before.enter(at)
        count = self._lead(history.digests[at : at + len(pages[0])], run)
        pages = [column[:count] for column in pages]
        run.append(history, at, at + count, pages)
        where, depths = self._where, self._depth
        for column, own in zip(self.columns, pages, strict=True):
            base = column.base
            for depth, page in enumerate(own.tolist(), at):
                if page:
                    where[page + base], depths[page + base] = run, depth
                else:
                    run.whole = False
        return run

    def _lead(self, digests: list[bytes], run: LinkRun) -> int:
        """How many of `digests` lead to `run` now: all, or those before one that led elsewhere or comes twice."""
        runs, before = self.runs, len(self.runs)
        for digest in digests:
            runs.setdefault(digest, run)
        if len(runs) - before == len(digests):
            return len(digests)
        for _ in range(len(runs) - before):
            runs.popitem()
        count = num_new(digests, runs)
        runs.update(dict.fromkeys(digests[:count], run))
        return count

    def _fill(self, run: LinkRun, at: int, pages: Sequence[array[int]]) -> None:
        """Gives the links of `run` from unit `at` on the pages that they lack."""
        if run.whole:
            return
        first = at - run.start
        for column, own, new in zip(self.columns, run.pages, pages, strict=True):
            for i, page in enumerate(new, first):
                if page and not own[i]:
                    own[i] = page
                    self._where[page + column.base], self._depth[page + column.base] = run, run.start + i

    # shrinking

    def drop(self, items: Sequence[int]) -> None:
        """Forgets pages, by their numbers among all pages of the manager."""
        where, depths, single, last = self._where, self._depth, len(self.columns) == 1, None
        touched: list[LinkRun] = []
        for item in items:
            run = where[item]
            where[item], at, run.whole = None, depths[item] - run.start, False
            if single:
                run.pages[0][at] = 0
            else:
                clear_page(self.columns, run.pages, at, item)
            if run is not last:
                touched.append(run)
                last = run
        for run in touched:
            self._prune(run)

    def _prune(self, run: LinkRun | None) -> None:
        """Takes links without pages off the end of `run`, and of those before it, where nobody is behind them."""
        while run and (needed := run.num_needed()) < len(run.digests):
            for digest in run.cut(needed):
                del self.runs[digest]
            if needed:
                return
            if run.before:
                run.before.leave(run.start)
            run = run.before

    # looking

    def holds(self, item: int) -> bool:
        """Whether that page is in the index."""
        return self._where[item] is not None

    def links(self) -> Iterator[Link]:
        """All links, each behind the one before it."""
        # not a set: runs lie in it by their addresses, and those that begin alike would come in another order each time
        for run in sorted(dict.fromkeys(self.runs.values()), key=lambda run: run.start):
            yield from run.links()

    def entries(self) -> Iterator[tuple[int, bytes, int]]:
        """(page's number, bytes of its whole history, column) of every page in the index."""
        histories: dict[bytes, bytes] = {}
        for link in self.links():
            history = histories[link.digest] = histories.get(link.before, b"") + link.extra + link.tokens
            for c, page in enumerate(link.pages):
                if page:
                    yield page + self.columns[c].base, history, c

    def check(self, columns: Sequence[Column]) -> None:
        """Asserts that every entry leads to a link that carries it, and that runs count who stands on them.

        Raises:
            AssertionError: which link is wrong.
        """
        runs, pages = set(self.runs.values()), 0
        assert len(self.runs) == sum(len(run.digests) for run in runs), "a link lies under another one's digest"
        behind: dict[tuple[int, int], int] = {}
        for run in runs:
            run.check()
            assert all(self.runs.get(digest) is run for digest in run.digests), "a link is not under its digest"
            if run.before:
                assert run.before in runs and run.before.end >= run.start, "a run continues a link that is gone"
                behind[id(run.before), run.start] = behind.get((id(run.before), run.start), 0) + 1
            for column, own in zip(columns, run.pages, strict=True):
                for depth, page in enumerate(own, run.start):
                    found = self._where[page + column.base], self._depth[page + column.base]
                    assert not page or found == (run, depth), f"page {page} is not where the index has it"
                    pages += page != 0
        for run in runs:
            for units in range(run.start, run.end + 1):
                users, runs_behind = run.users.get(units, 0), behind.get((id(run), units), 0)
                assert users >= runs_behind, "a link is used by fewer than continue it"
        assert pages == len(self._where) - self._where.count(None), "a page is in a link that is gone"
