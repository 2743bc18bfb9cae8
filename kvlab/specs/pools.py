"""How the groups of a model share memory: three policies, one description that allocator, storage and planner read.

    per_kind   a pool for each group; a page id is a page in each of its layers. What one pool has free, no other uses
    unified    one pool, one page size. Groups are cut to equally many layers, the i-th layer of every group lies in the
               i-th buffer, and attention pages take more tokens until a state fits: any free page serves any group
    sectors    one pool of sectors; a group that needs a page takes a sector and cuts it into pages of its own size,
               and gives it back when all of them are free

A pool's unit is what it counts: a page id, or a sector. Unit 0 is the null page (or sector) that nobody is given.
Sources: vLLM 0.33 v1/core/kv_cache_planning.py for unified (it differs by sizing pages with their padding);
transformers 5.24 generation/continuous_batching for sectors (it differs by a limit on their size).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvlab.specs.formats import ALIGN, align
from kvlab.specs.layout import Group, PageLayout, group_parts
from kvlab.specs.model import ModelSpec
from kvlab.specs.pages import cdiv, most_pages
from kvlab.specs.rollback import NOTHING_KEPT, RollbackPolicy

POOLS = ("per_kind", "unified", "sectors")

SECTOR_LIMIT = 8
"""A common multiple of the page sizes is used as the sector up to this many times the largest page."""


@dataclass(frozen=True)
class Place:
    """Where the pages of one member lie: rows of a pool's buffer, read through `layout`."""

    buffer: int
    layout: PageLayout


@dataclass(frozen=True)
class PoolLayout:
    """How groups share memory.

    Attributes:
        policy: one of `POOLS`.
        groups: in the order of the block tables; under "unified" one kind may be several of them.
        buffers: for each pool, the row bytes of its buffers; a unit is one row in each of them.
        places: for each group, where each member's pages lie.
        pages_per_unit: for each group, its pages in a unit.
    """

    policy: str
    groups: tuple[Group, ...]
    buffers: tuple[tuple[int, ...], ...]
    places: tuple[tuple[Place, ...], ...]
    pages_per_unit: tuple[int, ...]

    def pool_of(self, group: int) -> int:
        """Index of the pool that serves that group."""
        return group if self.policy == "per_kind" else 0

    @property
    def unit_bytes(self) -> tuple[int, ...]:
        """Bytes of a unit of each pool."""
        return tuple(map(sum, self.buffers))

    def page_bytes(self, group: int) -> int:
        """Bytes that a page id of that group takes of its pool, padding included."""
        return self.unit_bytes[self.pool_of(group)] // self.pages_per_unit[group]

    def pool_bytes(self, num_blocks: Sequence[int]) -> int:
        """Bytes of pools of so many units each, the null unit included.

        Raises:
            ValueError: not one number for each pool.
        """
        if len(num_blocks) != len(self.buffers):
            raise ValueError(
                f"num_blocks {tuple(num_blocks)}: must be one number for each of {len(self.buffers)} pools"
            )
        return sum(n * size for n, size in zip(num_blocks, self.unit_bytes, strict=True))

    def sequence_pages(self, tokens: int, in_flight: int, rollback: RollbackPolicy = NOTHING_KEPT) -> list[int]:
        """The most pages of each group that one sequence holds on its way to `tokens` tokens, kept states included.

        At most `in_flight` of its tokens are computed in a step.
        """
        return [
            group_pages(g, tokens, in_flight + rollback.slack)
            + (rollback.most(tokens) if g.retention.rule == "state" else 0)
            for g in self.groups
        ]

    def units(self, pages: Sequence[int]) -> tuple[int, ...]:
        """Units of each pool that a sequence with so many pages of each group takes when it is alone."""
        found = [0] * len(self.buffers)
        for g, count in enumerate(pages):
            found[self.pool_of(g)] += cdiv(count, self.pages_per_unit[g])
        return tuple(found)


def group_pages(group: Group, tokens: int, in_flight: int) -> int:
    """The most pages of `group` that one sequence holds on its way to `tokens` tokens; an encoder's are all there from
    the start."""
    if group.retention.rule == "encoder":
        return cdiv(max((getattr(part, "encoder_tokens", 0) for part in group.parts), default=0), group.block_size)
    return most_pages(group.retention, group.block_size, tokens, in_flight)


def pool_layout(model: ModelSpec, block_size: int, pools: str = "per_kind") -> PoolLayout:
    """The groups of `model` in memory shared by policy `pools`.

    Raises:
        ValueError: unknown policy, or a block size that the groups cannot have.
    """
    return lay_out(group_parts(model, block_size), pools)


def lay_out(groups: Sequence[Group], pools: str = "per_kind") -> PoolLayout:
    """`groups` (of one block size) in memory shared by policy `pools`.

    Raises:
        ValueError: unknown policy.
    """
    if pools not in POOLS:
        raise ValueError(f"pools {pools!r}: must be one of {', '.join(POOLS)}")
    # a single group has nobody to share with
    if pools == "unified" and len(groups) > 1:
        return _unified(groups)
    if pools == "sectors" and len(groups) > 1:
        return _sectors(groups)
    return PoolLayout(
        pools,
        tuple(groups),
        tuple(tuple(layout.page_bytes for layout in g.layouts) for g in groups),
        tuple(tuple(Place(i, layout) for i, layout in enumerate(g.layouts)) for g in groups),
        (1,) * len(groups),
    )


# one page size for all


def _unified(groups: Sequence[Group]) -> PoolLayout:
    kinds = [kind for group in groups for kind in _by_size(group)]
    page = _common_page(kinds)
    kinds = [_filled(kind, page) for kind in kinds]
    counts = [len(kind.members) for kind in kinds]
    # Source: vLLM's rule; the larger number where the last group then has few empty places
    slots = max(counts) if 2 * max(counts) < 3 * min(counts) else min(counts)
    cut = tuple(piece for kind in kinds for piece in _cut(kind, slots))
    cut = tuple(_numbered(cut))
    places = tuple(tuple(Place(i, replace(layout, page_bytes=page)) for i, layout in enumerate(g.layouts)) for g in cut)
    return PoolLayout("unified", cut, ((page,) * slots,), places, (1,) * len(cut))


def _by_size(group: Group) -> list[Group]:
    """`group` split so that all its members have pages of one size."""
    sizes = dict.fromkeys(layout.page_bytes for layout in group.layouts)
    return [_picked(group, [i for i, lay in enumerate(group.layouts) if lay.page_bytes == size]) for size in sizes]


def _picked(group: Group, indices: Sequence[int]) -> Group:
    return replace(
        group,
        members=tuple(group.members[i] for i in indices),
        layouts=tuple(group.layouts[i] for i in indices),
        parts=tuple(group.parts[i] for i in indices),
    )


def _cut(kind: Group, slots: int) -> list[Group]:
    count = len(kind.members)
    return [_picked(kind, range(i, min(count, i + slots))) for i in range(0, count, slots)]


def _numbered(groups: Sequence[Group]) -> list[Group]:
    seen: dict[str, int] = {}
    named = []
    for group in groups:
        seen[group.name] = seen.get(group.name, 0) + 1
        named.append(replace(group, name=group.name + (f"#{seen[group.name]}" if seen[group.name] > 1 else "")))
    return named


def _common_page(kinds: Sequence[Group]) -> int:
    """Bytes of a page that holds a block of every kind: the widest one's, of so many tokens that a state fits."""
    state = max((_widest(k) for k in kinds if k.retention.rule == "state"), default=0)
    paged = [k for k in kinds if k.retention.rule != "state"]
    if not paged:
        return state
    widest = max(paged, key=_widest)
    times = cdiv(state, _widest(widest)) or 1
    while _widest(widest.resized(times * widest.block_size)) < state:
        times += 1
    return _widest(widest.resized(times * widest.block_size))


def _widest(kind: Group) -> int:
    return max(layout.page_bytes for layout in kind.layouts)


def _filled(kind: Group, page: int) -> Group:
    """`kind` with blocks of as many tokens as fit `page` bytes, a multiple of its block size."""
    if kind.retention.rule == "state":
        return kind
    times = page // _widest(kind)
    # the gaps between segments do not grow with the tokens: there may be room for more
    while _widest(kind.resized((times + 1) * kind.block_size)) <= page:
        times += 1
    return kind.resized(times * kind.block_size)


# sectors


def _sectors(groups: Sequence[Group]) -> PoolLayout:
    """Sectors as large as the least common multiple of the groups' pages; or, where that is too large, as the largest
    page, of which other groups cut halves, quarters and so on, filled with as many tokens as fit."""
    largest = max(g.block_bytes for g in groups)
    sector = _common_sector([g.block_bytes for g in groups])
    if sector:
        cut, counts = list(groups), [sector // g.block_bytes for g in groups]
    else:
        counts = [_halvings(g, largest) for g in groups]
        sector = align(largest, ALIGN * max(counts))
        cut = [_fitting(g, sector // count) for g, count in zip(groups, counts, strict=True)]
    places = tuple(_in_rows(g, sector // count) for g, count in zip(cut, counts, strict=True))
    return PoolLayout("sectors", tuple(cut), ((sector,),), places, tuple(counts))


def sectors_as_they_are(groups: Sequence[Group]) -> PoolLayout:
    """`groups`, each with the blocks that it has, in one pool of sectors: for pages that lie there in place of others,
    whose tables count their tokens."""
    sector, counts = _sector_of([g.block_bytes for g in groups])
    places = tuple(_in_rows(g, sector // count) for g, count in zip(groups, counts, strict=True))
    return PoolLayout("sectors", tuple(groups), ((sector,),), places, tuple(counts))


def _common_sector(sizes: Sequence[int]) -> int:
    """The least common multiple of these page sizes, 0 when it is too large for a sector."""
    common = math.lcm(*sizes)
    return common if common <= SECTOR_LIMIT * max(sizes) else 0


def _sector_of(sizes: Sequence[int]) -> tuple[int, list[int]]:
    """Bytes of a sector for pages of these sizes, and how many of each it is cut into: a common multiple of all; or of
    all but the largest, an eighth unused by those at most; or else one of the largest, of which others take halves,
    quarters and so on."""
    largest = max(sizes)
    if sector := _common_sector(sizes):
        return sector, [sector // size for size in sizes]
    others = math.lcm(*(size for size in sizes if size < largest))
    for pages in range(1, SECTOR_LIMIT + 1):
        sector = align(pages * largest, math.lcm(others, ALIGN * pages))
        if 8 * sector <= 9 * pages * largest:
            return sector, [pages if size == largest else sector // size for size in sizes]
    counts = [1 << (largest // size).bit_length() - 1 for size in sizes]
    return align(largest, ALIGN * max(counts)), counts


def _halvings(group: Group, sector: int) -> int:
    """Pages of `group` per sector, a power of two: the most that leave at most an eighth of it unused, or else those
    that leave least."""
    unused = {}
    count = 1
    while count * group.block_bytes <= sector:
        page = sector // count
        unused[count] = page - _fitting(group, page).block_bytes
        count *= 2
    good = [count for count, rest in unused.items() if 8 * rest * count <= sector]
    return max(good) if good else min(unused, key=lambda count: unused[count] * count)


def _fitting(group: Group, page: int) -> Group:
    """`group` with blocks of as many tokens as fit `page` bytes over all its layers."""
    if group.retention.rule == "state":
        return group
    times = max(1, page // group.block_bytes)
    while group.resized((times + 1) * group.block_size).block_bytes <= page:
        times += 1
    return group.resized(times * group.block_size)


def _in_rows(group: Group, row_bytes: int) -> tuple[Place, ...]:
    """Each member's page as a stretch of a row that holds the pages of all members, one after the other."""
    places, start = [], 0
    for layout in group.layouts:
        moved = tuple(replace(s, offset=s.offset + start) for s in layout.segments)
        places.append(Place(0, PageLayout(layout.block_size, moved, row_bytes)))
        start += layout.page_bytes
    return tuple(places)
