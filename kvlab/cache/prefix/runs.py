"""The nodes of the radix tree: runs of units, and how two runs are compared."""

from __future__ import annotations

from array import array

from kvlab.cache.prefix.keys import History


class Node:
    """A run of units, `start` units deep.

    Attributes:
        key: its token bytes. extra: the extra key of a unit with media, which is a run of its own; of a root, its name.
        pages: of each column, the page of each unit, 0 where there is none.
        live: pages that are not 0.
        locks: requests that stand on it or below.
    """

    __slots__ = ("children", "extra", "key", "live", "locks", "pages", "parent", "start", "units")

    def __init__(
        self, parent: Node | None, start: int, key: bytes, pages: list[array[int]], extra: bytes = b""
    ) -> None:
        self.parent, self.start, self.key, self.pages, self.extra = parent, start, bytearray(key), pages, extra
        self.children: dict[bytes, Node] = {}
        self.locks, self.live = 0, 0
        self.units = len(pages[0])

    @property
    def whole(self) -> bool:
        """Whether no page is missing."""
        return self.live == self.units * len(self.pages)

    def num_needed(self) -> int:
        """Units up to the last one that has a page."""
        count = self.units
        for row in zip(*map(reversed, self.pages), strict=True):
            if any(row):
                break
            count -= 1
        return count


class NodePath:
    """The nodes of a known history, first to last, and how many units of the last one belong to it."""

    __slots__ = ("nodes", "root", "units")

    def __init__(self, root: Node | None, nodes: list[Node], units: int) -> None:
        self.root, self.nodes, self.units = root, nodes, units

    @property
    def whole(self) -> bool:
        """Whether no page of any column is missing."""
        return all(node.whole for node in self.nodes)

    def pages(self, column: int) -> array[int]:
        """The page of each unit in that column, 0 where there is none."""
        if not self.nodes:
            return array("i")
        last = self.nodes[-1]
        rest = last.pages[column][: self.units - last.start]
        if last is self.nodes[0]:
            return rest
        found = array("i")
        for node in self.nodes[:-1]:
            found += node.pages[column]
        return found + rest


def num_common(node: Node, history: History, at: int, most: int) -> int:
    """How many of the history's `most` units from `at` on are in `node`; the first one is known to be."""
    return 1 if node.extra else history.num_equal(at, at + most, node.key)


def run_length(history: History, at: int, most: int) -> int:
    """Units from `at` on that make one node: one with media, or all before the next one with media."""
    if not history.has_media or history.media_of(at):
        return 1 if history.has_media else most
    stop = 1
    while stop < most and not history.media_of(at + stop):
        stop += 1
    return stop
