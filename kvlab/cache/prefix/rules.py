"""How much of a known history each group of layers can go on from, and all of them together.

    keep all, entries of several tokens   every page from the first on: read from the left, up to the first that is gone
    window, chunk                         the pages that the next query reads: looked for from the right
    state                                 a copy of exactly that length

A shorter length that suits one group may not suit another, so the groups are asked in turn until none shortens it.
Source: vLLM v1/core/kv_cache_coordinator.py (HybridKVCacheCoordinator.find_longest_cache_hit).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.cache.prefix.index import Path, has_gap
from kvlab.specs.layout import Group
from kvlab.specs.pages import dead_pages
from kvlab.specs.parts import Retention


def unit_tokens(groups: Sequence[Group]) -> int:
    """The fewest tokens at whose multiples a page of every group ends; states have none."""
    sizes = [group.block_size for group in groups if group.retention.rule != "state"]
    return math.lcm(*(sizes or [groups[0].block_size]))


@dataclass(frozen=True)
class GroupRule:
    """A group as the prefix cache sees it.

    Attributes:
        group: its index. retention, block_size: as the group has them.
        columns: indices of its columns, in the order of its pages in a unit.
        unit: tokens of a unit.
        slack: tokens by which a window keeps its pages longer.
    """

    group: int
    retention: Retention
    block_size: int
    columns: tuple[int, ...]
    unit: int
    slack: int = 0

    @property
    def is_state(self) -> bool:
        """Whether it has one page for all tokens so far."""
        return self.retention.rule == "state"

    @property
    def is_sliding(self) -> bool:
        """Whether it gives pages back while its request runs."""
        return self.retention.rule in ("window", "chunk")

    def pages(self, path: Path, units: int) -> array[int]:
        """Its pages of the first `units` units of `path`, in the order of its block table; a state's one per unit."""
        if len(self.columns) == 1:
            found = path.pages(self.columns[0])
            return found if len(found) == units else found[:units]
        found = array("i", [0]) * (units * len(self.columns))
        for place, column in enumerate(self.columns):
            found[place :: len(self.columns)] = path.pages(column)[:units]
        return found

    def dead(self, units: int) -> range:
        """The table entries that nobody needs who goes on behind `units` units."""
        if not self.is_sliding:
            return range(0)
        dead = dead_pages(self.retention, self.block_size, max(0, units * self.unit - self.slack))
        return range(dead.start, max(dead.start, min(dead.stop, units * len(self.columns))))

    def longest(self, pages: array[int], units: int) -> int:
        """The largest number of units, at most `units`, that the group can go on from."""
        per_unit = len(self.columns)
        if self.is_state:
            while units and not pages[units - 1]:
                units -= 1
            return units
        if not self.is_sliding:
            return _first_gap(pages, 0, units * per_unit) // per_unit
        while units:
            dead = self.dead(units)
            gap = _first_gap(pages, 0, min(dead.start, units * per_unit))
            if gap == min(dead.start, units * per_unit):
                gap = _last_gap(pages, dead.stop, units * per_unit)
            if gap is None:
                break
            # no shorter length that still covers the gap can do without it
            units = gap // per_unit
        return units


def _first_gap(pages: array[int], start: int, stop: int) -> int:
    """The first index from `start` on without a page, or `stop`."""
    if start == 0 and stop == len(pages) and not has_gap(pages):
        # the usual answer, told faster
        return stop
    try:
        return min(stop, pages.index(0, start, stop))
    except ValueError:
        return stop


def _last_gap(pages: array[int], start: int, stop: int) -> int | None:
    """The last index in start .. stop - 1 without a page."""
    for i in range(stop - 1, start - 1, -1):
        if not pages[i]:
            return i
    return None


def longest_common(rules: Sequence[GroupRule], path: Path, units: int) -> tuple[int, list[array[int]]]:
    """The units, at most `units`, that every group can go on from, and each group's pages of `path`."""
    pages = [rule.pages(path, min(units, path.units)) for rule in rules]
    found, agreed = min(units, path.units), -1
    if path.whole:
        return found, pages
    while found != agreed:
        agreed = found
        for rule, own in zip(rules, pages, strict=True):
            found = rule.longest(own, found)
    return found, pages
