"""The hash chain: a dict from the digest of a whole history to the link that carries its last unit.

    digest of unit i = sha256(digest of unit i - 1, token bytes of unit i, extra keys of unit i)

A link also has its tokens, its extra keys and the link before it. A hit compares all three, so by induction the whole
history is compared: two histories of equal digests never share a page, they cost the second one its place.
A link without pages stays as long as links behind it have some, or a request stands on it.

Source: vLLM v1/core/kv_cache_utils.py (hash_block_tokens) and block_pool.py; it differs by comparing tokens, and by
having one page for one history: what a second request computed at the same time is given back for the first one's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256

from kvlab.cache.prefix.index import Column, Handle
from kvlab.cache.prefix.keys import History
from kvlab.cache.prefix.options import PrefixOptions, sha256_digest

ROOT_DIGEST = sha256(b"kvlab prefix cache, root of every history").digest()
"""The same in every process, so that caches of several can be compared."""


class Link:
    """The last unit of one history.

    `users`: links behind it, and requests that stand on it.
    """

    __slots__ = ("before", "digest", "extra", "pages", "tokens", "users")

    def __init__(self, digest: bytes, before: Link | None, tokens: bytes, extra: bytes, pages: list[int]) -> None:
        self.digest, self.before, self.tokens, self.extra = digest, before, tokens, extra
        self.pages, self.users = pages, 0


class LinkPath:
    """The links of a known history, first to last."""

    __slots__ = ("links",)

    def __init__(self, links: list[Link]) -> None:
        self.links = links

    @property
    def units(self) -> int:
        """Length of the history."""
        return len(self.links)

    def pages(self, column: int) -> list[int]:
        """The page of each unit in that column, 0 where there is none."""
        return [link.pages[column] for link in self.links]


class HashChain:
    """The index as a hash chain; see `kvlab.cache.prefix.index`.

    Attributes:
        links: by digest.
        collisions: times that a history could not be put in because another one has its digest.
    """

    def __init__(self, columns: Sequence[Column], options: PrefixOptions, size: int) -> None:
        self.columns, self._digest = tuple(columns), options.digest
        self.links: dict[bytes, Link] = {}
        self.collisions = 0
        self._where: list[Link | None] = [None] * size

    def walk(self, history: History, units: int) -> LinkPath:
        """The longest known history, of at most `units` units, that `history` begins with."""
        self._extend(history, units)
        plain, before, found = history.plain, None, []
        get = self.links.get
        for i, (digest, tokens) in enumerate(zip(history.digests[:units], history.pieces, strict=False)):
            link = get(digest)
            if link is None or link.before is not before or link.tokens != tokens:
                break
            if link.extra != (plain if i and plain is not None else history.extra(i)):
                break
            found.append(link)
            before = link
        return LinkPath(found)

    def _extend(self, history: History, units: int) -> None:
        """Works out the digests of the first `units` units."""
        digests, digest = history.digests, self._digest
        if units <= len(digests):
            return
        history.extend(units)
        parent, first = digests[-1] if digests else ROOT_DIGEST, len(digests)
        if history.plain == b"" and first:
            if digest is sha256_digest:
                for tokens in history.pieces[first:units]:
                    parent = sha256(parent + tokens).digest()
                    digests.append(parent)
                return
            for tokens in history.pieces[first:units]:
                parent = digest(parent + tokens)
                digests.append(parent)
            return
        for i in range(first, units):
            parent = digest(parent + history.pieces[i] + history.extra(i))
            digests.append(parent)
            if i == 0 and history.plain == b"":
                self._extend(history, units)
                return

    def lock(self, history: History, path: LinkPath, units: int) -> Handle:
        """The place after the first `units` units of `path`."""
        tail = path.links[units - 1] if units else None
        if tail:
            tail.users += 1
        return Handle(units, tail)

    def insert(self, handle: Handle, history: History, pages: Sequence[Sequence[int]]) -> list[list[int]]:
        """The pages that the index has of the handle's next units; see `PrefixIndex.insert`."""
        first, count = handle.units, len(pages[0])
        self._extend(history, first + count)
        tail, plain, links, where = handle.tail, history.plain, self.links, self._where
        single, base = len(pages) == 1, self.columns[0].base
        kept: list[list[int]] = []
        digests, pieces = history.digests[first:], history.pieces[first:]
        # the pages of each unit
        units = [[page] for page in pages[0]] if single else map(list, zip(*pages, strict=True))
        for i, (digest, tokens, own) in enumerate(zip(digests, pieces, units, strict=False), first):
            extra = plain if i and plain is not None else history.extra(i)
            link = links.get(digest)
            if link is None:
                link = links[digest] = Link(digest, tail, tokens, extra, own)
                if tail:
                    tail.users += 1
                if not single:
                    self._note(link, own)
                elif own[0]:
                    where[own[0] + base] = link
            elif link.before is not tail or link.tokens != tokens or link.extra != extra:
                self.collisions += 1
                handle.closed = True
                break
            else:
                self._fill(link, own)
            kept.append(link.pages)
            tail = link
        self._stand(handle, tail, first + len(kept))
        return list(map(list, zip(*kept, strict=True))) if kept else [[] for _ in pages]

    def _note(self, link: Link, pages: Sequence[int]) -> None:
        for column, page in zip(self.columns, pages, strict=True):
            if page:
                self._where[page + column.base] = link

    def _fill(self, link: Link, pages: Sequence[int]) -> None:
        """Gives `link` the pages that it lacks."""
        for c, page in enumerate(pages):
            if page and not link.pages[c]:
                link.pages[c] = page
                self._where[page + self.columns[c].base] = link

    def _stand(self, handle: Handle, tail: Link | None, units: int) -> None:
        if tail is not handle.tail:
            before, handle.tail = handle.tail, tail
            if tail:
                tail.users += 1
            if before:
                before.users -= 1
                self._prune(before)
        handle.units = units

    def retreat(self, handle: Handle, history: History, units: int) -> None:
        """Moves the handle back behind the first `units` units."""
        tail = handle.tail
        for _ in range(handle.units - units):
            tail = tail.before
        self._stand(handle, tail, units)

    def release(self, handle: Handle) -> None:
        """Forgets the handle."""
        self._stand(handle, None, 0)

    def drop(self, items: Sequence[int]) -> None:
        """Forgets pages, by their numbers among all pages of the manager."""
        where, links, single = self._where, self.links, len(self.columns) == 1
        for item in items:
            link = where[item]
            where[item] = None
            if single:
                link.pages[0] = 0
            else:
                self._clear(link, item)
            if not link.users and (single or not any(link.pages)):
                del links[link.digest]
                before = link.before
                if before:
                    before.users -= 1
                    if not before.users and not before.pages[0]:
                        self._prune(before)

    def _clear(self, link: Link, item: int) -> None:
        for c, column in enumerate(self.columns):
            if link.pages[c] and link.pages[c] + column.base == item:
                link.pages[c] = 0
                return

    def _prune(self, link: Link | None) -> None:
        while link and not link.users and not any(link.pages):
            del self.links[link.digest]
            link = link.before
            if link:
                link.users -= 1

    def holds(self, item: int) -> bool:
        """Whether that page is in the index."""
        return self._where[item] is not None

    def entries(self) -> Iterator[tuple[int, bytes, int]]:
        """(page's number, bytes of its whole history, column) of every page in the index."""
        histories: dict[int, bytes] = {}
        for link in self.links.values():
            chain, at = [], link
            while at and id(at) not in histories:
                chain.append(at)
                at = at.before
            for at in reversed(chain):
                histories[id(at)] = (histories[id(at.before)] if at.before else b"") + at.extra + at.tokens
            for c, column in enumerate(self.columns):
                if link.pages[c]:
                    yield link.pages[c] + column.base, histories[id(link)], c

    def check(self, columns: Sequence[Column]) -> None:
        """Asserts that every entry leads to a link that carries it, and that links count who stands on them.

        Raises:
            AssertionError: which link is wrong.
        """
        behind: dict[int, int] = {}
        for digest, link in self.links.items():
            assert link.digest == digest, "a link lies under another one's digest"
            before = link.before
            assert before is None or self.links.get(before.digest) is before, "a link continues one that is gone"
            behind[id(before)] = behind.get(id(before), 0) + 1
            assert any(link.pages) or link.users, "a link without pages, and nobody behind it or on it"
            for page, column in zip(link.pages, columns, strict=True):
                assert not page or self._where[page + column.base] is link, f"page {page} is not in the index"
        for link in self.links.values():
            assert link.users >= behind.get(id(link), 0), "a link is used by fewer than continue it"
        pages = sum(1 for link in self.links.values() for page in link.pages if page)
        assert pages == len(self._where) - self._where.count(None), "a page is in a link that is gone"
