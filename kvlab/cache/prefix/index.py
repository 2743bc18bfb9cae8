"""What both designs of the index answer, and the records that they share.

The index maps (the history of n units, column) to a page. A column is one of the pages that a unit takes: of a group
whose pages cover a whole unit there is one, of smaller pages several, and a group of states has one, for a copy of the
state after the unit. A column has no page where none was kept: behind a window, or where no state was copied.

    walk     the longest known history that a request begins with; changes nothing
    lock     a request stands on the first n units of it: what it stands on stays in the index
    insert   the pages of its next units; where the index has pages of that history already, those are returned
    retreat  the request stands on fewer units
    release  the request is gone
    drop     pages are evicted
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvlab.cache.prefix.keys import History


@dataclass(frozen=True)
class Column:
    """One of the pages that a unit takes.

    Attributes:
        group: index of the page's group.
        place: which of the group's pages in the unit.
        base: the page's number among all pages of the manager is this plus its id.
    """

    group: int
    place: int
    base: int


def clear_page(columns: Sequence[Column], pages: Sequence[array[int]], at: int, item: int) -> None:
    """Takes page `item`, by its number among all pages of the manager, out of unit `at`; `pages` are of each column."""
    for column, own in zip(columns, pages, strict=True):
        if own[at] and own[at] + column.base == item:
            own[at] = 0
            return


def has_gap(pages: array[int]) -> bool:
    """Whether any of `pages` is 0: their bytes tell it at once where none is."""
    return bytes(pages.itemsize) in pages.tobytes() and 0 in pages


class Path(Protocol):
    """A known history that a request begins with. `units` says how long it is; `whole`, when it is true, that no page
    of it is missing in any column."""

    units: int

    @property
    def whole(self) -> bool: ...

    def pages(self, column: int) -> array[int]:
        """The page of each unit, 0 where there is none."""


@dataclass
class Handle:
    """Where a request stands: on its first `units` units. `tail` is the design's own record of the place.

    `closed`: nothing of this request can be put in any more. Another history has the same digest; or another request has
    the same tokens in pages whose groups may be open, and this one keeps its own.
    """

    units: int
    tail: Any
    closed: bool = False


class PrefixIndex(Protocol):
    """See the module's docstring."""

    def walk(self, history: History, units: int) -> Path:
        """The longest known history, of at most so many units, that `history` begins with."""

    def lock(self, history: History, path: Path, units: int) -> Handle:
        """The place after the first `units` units of `path`."""

    def insert(self, handle: Handle, history: History, pages: Sequence[array[int]]) -> list[array[int]]:
        """The pages that the index has of the handle's next units from now on, by column; the handle stands behind
        them. They are `pages` (0: none), but where it had another one already."""

    def retreat(self, handle: Handle, history: History, units: int) -> None:
        """Moves the handle back behind the first `units` units."""

    def release(self, handle: Handle) -> None:
        """Forgets the handle."""

    def drop(self, items: Sequence[int]) -> None:
        """Forgets pages, by their numbers among all pages of the manager."""

    def holds(self, item: int) -> bool:
        """Whether that page is in the index."""

    def entries(self) -> Iterator[tuple[int, bytes, int]]:
        """(page's number, bytes of its whole history, column) of every page in the index; for checks and tests."""

    def check(self, columns: Sequence[Column]) -> None:
        """Asserts the design's own invariants."""
