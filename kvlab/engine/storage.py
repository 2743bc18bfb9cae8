"""The pool's bytes: uint8 buffers in which the pages of every part of a layer lie, and nothing else.

What was predicted must be what was allocated: the engine compares the plan's number with the sum of the buffers'
distinct storages, to the byte, before it takes a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvlab.cache.kept import PageCopy
from kvlab.ops.copy_pages import copy_pages
from kvlab.ops.grouped_views import GroupedViews
from kvlab.ops.views import PageViews, SegmentViews, part_views
from kvlab.specs.grouped import RecentWindow
from kvlab.specs.layout import Group
from kvlab.specs.model import ModelSpec
from kvlab.specs.pools import PoolLayout, lay_out


@dataclass(frozen=True)
class KVUse:
    """Bytes of the cache.

    Attributes:
        predicted_bytes: the plan's number for this pool.
        allocated_bytes: of the pool's distinct storages.
        held_bytes: of the pages that requests hold now.
        used_bytes: of the entries that live requests have computed and may still read, nothing rounded to pages.
        peak_held_bytes, peak_used_bytes: the most of each at any step so far.
    """

    predicted_bytes: int
    allocated_bytes: int
    held_bytes: int = 0
    used_bytes: int = 0
    peak_held_bytes: int = 0
    peak_used_bytes: int = 0


class PagedStorage:
    """The buffers of every pool, and each part's pages in them.

    Attributes:
        layout: how the groups share memory.
        buffers: uint8 [pages, row bytes] by (layer index, part index): the pages of that part, other parts' bytes
            between them where the policy shares memory.
    """

    def __init__(
        self, layout: PoolLayout | Sequence[Group], num_blocks: Sequence[int], device: torch.device
    ) -> None:  # fmt: skip
        self.layout = layout = layout if isinstance(layout, PoolLayout) else lay_out(layout)
        self.num_blocks = tuple(num_blocks)
        # not cleared: no operation reads a slot that it, or an earlier step, has not written
        pools = [
            [torch.empty(count, width, dtype=torch.uint8, device=device) for width in widths]
            for widths, count in zip(layout.buffers, num_blocks, strict=True)
        ]
        # for each group the rows that make up its pages
        self._rows = [
            [buffer.view(len(buffer) * per_unit, -1) for buffer in pools[layout.pool_of(g)]]
            for g, per_unit in enumerate(layout.pages_per_unit)
        ]
        self.buffers: dict[tuple[int, int], torch.Tensor] = {}
        for rows, group, places in zip(self._rows, layout.groups, layout.places, strict=True):
            for member, place in zip(group.members, places, strict=True):
                self.buffers[member] = rows[place.buffer]

    def views(self, spec: ModelSpec) -> list[tuple[PageViews | SegmentViews | GroupedViews | None, ...]]:
        """Views of each part of each layer of `spec`, None for a part that owns nothing."""
        by_member = {
            member: part_views(self.buffers[member], place.layout, g)
            for g, (group, places) in enumerate(zip(self.layout.groups, self.layout.places, strict=True))
            for member, place in zip(group.members, places, strict=True)
        }
        for layer in spec.layers:
            for i, part in enumerate(layer.parts):
                if isinstance(part, RecentWindow):
                    closed = (layer.index, part.of)
                    groups = layer.parts[part.of]
                    by_member[closed] = GroupedViews(groups, by_member[closed], by_member[layer.index, i])
        return [tuple(by_member.get((x.index, i)) for i in range(len(x.parts))) for x in spec.layers]

    def rows(self, group: int) -> list[torch.Tensor]:
        """uint8 [pages, bytes] of each buffer in which pages of that group lie: row p of all of them is page p."""
        return self._rows[group]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the distinct storages behind the buffers, as torch has them."""
        storages = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in self.buffers.values()}
        return sum(storages.values())

    def fill(self, value: int, group: int | None = None, blocks: Sequence[int] | None = None) -> None:
        """Sets every byte of the given pages (None: all) to `value`; 255 is NaN in every float format."""
        for g in range(len(self._rows)) if group is None else (group,):
            for rows in self._rows[g]:
                if blocks is None:
                    rows.fill_(value)
                else:
                    rows[torch.tensor(blocks, device=rows.device)] = value

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Makes a page of a group a copy of another, in every layer: one (group, source, destination) after the other."""
        for group, pairs in apart(copies):
            own = self._rows[group]
            index = torch.tensor(pairs, device=own[0].device)
            for rows in own:
                copy_pages(rows, rows, index)


def apart(copies: Sequence[PageCopy]) -> list[tuple[int, list[tuple[int, int]]]]:
    """`copies` in order, as (group, pairs of pages) of which no page is both read and written, and none written twice:
    what the device may do in any order."""
    found: list[tuple[int, list[tuple[int, int]]]] = []
    read, written = set(), set()
    for group, source, destination in copies:
        if not found or found[-1][0] != group or source in written or destination in read | written:
            found.append((group, []))
            read, written = set(), set()
        found[-1][1].append((source, destination))
        read.add(source)
        written.add(destination)
    return found
