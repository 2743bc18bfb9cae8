"""The radix tree: runs of units that no request has left in the middle, each a node below the run before it.

A node has the token bytes of its run and, for each column, an array of pages. Its children are told apart by their
first unit, a unit being the tokens of a page: splits happen at page ends alone. A unit that media overlap is a node of
its own, its extra key part of the child's key. Adapter and salt choose the root.

Requests lock the path from their node to the root, whatever pages of it they hold: a locked node and its tokens stay.
What is not locked is evictable, page by page from the ends of leaves: inner nodes have leaves behind them that go first.

Source: SGLang srt/mem_cache/radix_cache.py; it differs by comparing bytes, and by counting its sizes in pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from kvlab.cache.prefix.index import Column, Handle, clear_page
from kvlab.cache.prefix.keys import TOKEN_BYTES, History
from kvlab.cache.prefix.options import PrefixOptions
from kvlab.cache.prefix.runs import Node, NodePath, num_common, run_length


class RadixTree:
    """The index as a radix tree; see `kvlab.cache.prefix.index`.

    Attributes:
        roots: by adapter and salt.
        evictable, protected: pages in nodes that nobody locks, and in locked ones.
    """

    def __init__(self, columns: Sequence[Column], options: PrefixOptions, size: int) -> None:
        self.columns = tuple(columns)
        self.roots: dict[bytes, Node] = {}
        self.evictable = self.protected = 0
        # of every page, the node that has it, and how many units are before it
        self._where: list[Node | None] = [None] * size
        self._depth = [0] * size

    # finding

    def walk(self, history: History, units: int) -> NodePath:
        """The longest known history, of at most `units` units, that `history` begins with."""
        root = node = self.roots.get(history.namespace)
        at, nodes = 0, []
        while node and at < units:
            child = node.children.get(history.token_bytes(at, at + 1) + history.media_of(at))
            if child is None:
                break
            same = num_common(child, history, at, run_length(history, at, units - at))
            nodes.append(child)
            at += same
            if same < child.units:
                break
            node = child
        return NodePath(root, nodes, at)

    # standing

    def lock(self, history: History, path: NodePath, units: int) -> Handle:
        """The place after the first `units` units of `path`; a node that it ends inside of is split there."""
        root = path.root
        if root is None:
            name = history.namespace
            root = self.roots.setdefault(name, Node(None, 0, b"", [array("i") for _ in self.columns], name))
        node = root
        for one in path.nodes:
            if one.start >= units:
                break
            node = one
        if node.start + node.units > units:
            node = self._split(node, units - node.start)
        self._locked(node, None, 1)
        return Handle(units, node)

    def retreat(self, handle: Handle, history: History, units: int) -> None:
        """Moves the handle back behind the first `units` units."""
        before = node = handle.tail
        while node.start >= units and node.parent:
            node = node.parent
        if node.start + node.units > units:
            node = self._split(node, units - node.start)
        self._locked(before, node, -1)
        handle.units, handle.tail = units, node
        self._prune(before)

    def release(self, handle: Handle) -> None:
        """Forgets the handle."""
        node, handle.tail, handle.units = handle.tail, None, 0
        self._locked(node, None, -1)
        self._prune(node)

    def _locked(self, node: Node | None, above: Node | None, change: int) -> None:
        """Adds `change` to the locks of `node` and of every node between it and `above`."""
        while node is not above:
            before, node.locks = node.locks, node.locks + change
            assert node.locks >= 0, "a node is released more often than it was locked"
            if not before or not node.locks:
                self.protected += node.live * change
                self.evictable -= node.live * change
            node = node.parent

    # growing

    def insert(self, handle: Handle, history: History, pages: Sequence[array[int]]) -> list[array[int]]:
        """The pages that the index has of the handle's next units; see `PrefixIndex.insert`."""
        first, count, width = handle.units, len(pages[0]), history.unit * TOKEN_BYTES
        data, node, at = history.token_bytes(first, first + count), handle.tail, 0
        kept = [array("i") for _ in pages]
        while at < count:
            extra = history.media_of(first + at)
            child = node.children.get(data[at * width : (at + 1) * width] + extra)
            run = run_length(history, first + at, count - at)
            rest = [column[at:] for column in pages]
            if child is None:
                stop = at + run
                part = [column[: stop - at] for column in rest]
                node = self._grown(handle, node, data[at * width : stop * width], part, extra)
                at = stop
                for column, own in zip(kept, part, strict=True):
                    column += own
                continue
            same = num_common(child, history, first + at, run)
            node = self._split(child, same) if same < child.units else child
            self._fill(node, rest)
            for column, theirs in zip(kept, node.pages, strict=True):
                column += theirs
            at += same
        self._locked(node, handle.tail, 1)
        handle.units, handle.tail = first + count, node
        return kept

    def _grown(self, handle: Handle, node: Node, key: bytes, pages: list[array[int]], extra: bytes) -> Node:
        """The node that has these units behind `node`: itself, when the handle's request alone stands there."""
        own = node is handle.tail and node.locks == 1 and not node.children and node.parent and not node.extra
        if own and not extra:
            node.key += key
            for column, more in zip(node.pages, pages, strict=True):
                column += more
            grown, at = node, node.units
            node.units += len(pages[0])
        else:
            grown, at = Node(node, node.start + node.units, key, [column[:] for column in pages], extra), 0
            node.children[key[: len(key) // grown.units] + extra] = grown
        self._note(grown, at)
        return grown

    def _note(self, node: Node, first: int) -> None:
        """Notes where the pages of `node` are, from unit `first` of it on, and counts them."""
        where, depths = self._where, self._depth
        live = (node.units - first) * len(node.pages)
        for column, pages in zip(self.columns, node.pages, strict=True):
            base = column.base
            for depth, page in enumerate(pages[first:].tolist(), node.start + first):
                if page:
                    where[page + base], depths[page + base] = node, depth
                else:
                    live -= 1
        self._count(node, live)

    def _fill(self, node: Node, pages: Sequence[array[int]]) -> None:
        """Gives `node` the pages that it lacks."""
        for c, column in enumerate(() if node.whole else self.columns):
            for at, page in enumerate(pages[c][: node.units]):
                if page and not node.pages[c][at]:
                    node.pages[c][at] = page
                    self._where[page + column.base], self._depth[page + column.base] = node, node.start + at
                    self._count(node, 1)

    def _count(self, node: Node, change: int) -> None:
        node.live += change
        if node.locks:
            self.protected += change
        else:
            self.evictable += change

    def _split(self, node: Node, units: int) -> Node:
        """The new node of the first `units` units of `node`, which keeps the others and stays where requests stand."""
        width = len(node.key) // node.units
        upper = Node(node.parent, node.start, node.key[: units * width], [column[:units] for column in node.pages])
        upper.locks = node.locks
        node.parent.children[bytes(node.key[:width])] = upper
        node.key, node.start, node.parent = node.key[units * width :], node.start + units, upper
        node.pages = [column[units:] for column in node.pages]
        node.units -= units
        upper.children[bytes(node.key[:width])] = node
        for column, pages in zip(self.columns, upper.pages, strict=True):
            for page in pages:
                if page:
                    self._where[page + column.base] = upper
                    upper.live += 1
        node.live -= upper.live
        return upper

    # shrinking

    def drop(self, items: Sequence[int]) -> None:
        """Forgets pages, by their numbers among all pages of the manager."""
        single, where, depths, last = len(self.columns) == 1, self._where, self._depth, None
        touched: list[tuple[Node, int]] = []
        for number, item in enumerate(items):
            node = where[item]
            where[item], at = None, depths[item] - node.start
            if single:
                node.pages[0][at] = 0
            else:
                clear_page(self.columns, node.pages, at, item)
            if node is not last:
                touched.append((node, number))
                last = node
        stops = [number for _, number in touched[1:]] + [len(items)]
        for (node, first), stop in zip(touched, stops, strict=True):
            self._count(node, first - stop)
            self._prune(node)

    def _prune(self, node: Node) -> None:
        """Takes units without pages off the end of `node`, and of those above it, where nobody is behind them."""
        while not node.locks and not node.children:
            parent, units = node.parent, node.num_needed()
            if parent is None:
                del self.roots[node.extra]
                return
            if units == node.units:
                return
            width = len(node.key) // node.units
            first = bytes(node.key[:width]) + node.extra
            del node.key[units * width :]
            for pages in node.pages:
                del pages[units:]
            node.units = units
            if units:
                return
            del parent.children[first]
            node = parent

    # looking

    def holds(self, item: int) -> bool:
        """Whether that page is in the index."""
        return self._where[item] is not None

    def nodes(self) -> Iterator[Node]:
        """All nodes, parents before their children."""
        queue = list(self.roots.values())
        for node in queue:
            yield node
            queue += node.children.values()

    def entries(self) -> Iterator[tuple[int, bytes, int]]:
        """(page's number, bytes of its whole history, column) of every page in the index."""
        histories: dict[int, bytes] = {}
        for node in self.nodes():
            width = len(node.key) // node.units if node.units else 0
            before = histories[id(node.parent)] if node.parent else b""
            histories[id(node)] = before + node.extra + bytes(node.key)
            for c, column in enumerate(self.columns):
                for at, page in enumerate(node.pages[c]):
                    if page:
                        yield page + column.base, before + node.extra + bytes(node.key[: (at + 1) * width]), c

    def check(self, columns: Sequence[Column]) -> None:
        """Asserts that the tree is whole, and that evictable and protected pages are all pages.

        Raises:
            AssertionError: which node is wrong.
        """
        evictable = protected = 0
        for node in self.nodes():
            live = 0
            for column, pages in zip(columns, node.pages, strict=True):
                assert len(pages) == node.units, "a node's columns are of different lengths"
                for at, page in enumerate(pages):
                    where = self._where[page + column.base], self._depth[page + column.base]
                    assert not page or where == (node, node.start + at), f"page {page} is not where the index has it"
                    live += page != 0
            assert live == node.live, "a node's pages are miscounted"
            protected, evictable = protected + live * bool(node.locks), evictable + live * (not node.locks)
            width = len(node.key) // node.units if node.units else 0
            assert node.parent is None or node.units, "a node without units"
            for key, child in node.children.items():
                one = len(child.key) // child.units
                assert key == bytes(child.key[:one]) + child.extra, "a child lies under a key that is not its own"
                assert child.parent is node and child.start == node.start + node.units, "a child is in the wrong place"
                assert not width or width == one, "units of different widths"
            assert node.locks >= sum(child.locks for child in node.children.values()), "locks end inside a path"
            ends = node.locks or node.children or (node.units and any(pages[-1] for pages in node.pages))
            assert ends, "a node ends in units without pages that nobody needs"
        assert (evictable, protected) == (self.evictable, self.protected), "evictable or protected is miscounted"
        assert evictable + protected == len(self._where) - self._where.count(None), "a page is in no node"
