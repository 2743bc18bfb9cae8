"""The pool's bytes: per part of a layer one uint8 buffer [num_pages, page_bytes], and nothing else.

What was predicted must be what was allocated: the engine compares the plan's number with the sum of the buffers'
distinct storages, to the byte, before it takes a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvlab.ops.views import PageViews, SegmentViews, part_views
from kvlab.specs.formats import get_format
from kvlab.specs.layout import Group
from kvlab.specs.model import ModelSpec


def with_kv_format(spec: ModelSpec, kv_dtype: str) -> ModelSpec:
    """`spec` with every part that keeps keys and values stored in `kv_dtype`.

    Raises:
        ValueError: unknown dtype.
    """
    fmt = get_format(kv_dtype)

    def changed(part):
        return replace(part, format=fmt) if hasattr(part, "format") else part

    return replace(spec, layers=tuple(replace(layer, parts=tuple(map(changed, layer.parts))) for layer in spec.layers))


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
    """The buffers of every part that has pages.

    Attributes:
        buffers: uint8 [num_pages, page_bytes] by (layer index, part index).
    """

    def __init__(self, groups: Sequence[Group], num_blocks: Sequence[int], device: torch.device) -> None:
        self.groups, self.num_blocks = tuple(groups), tuple(num_blocks)
        # not cleared: no operation reads a slot that it, or an earlier step, has not written
        self.buffers: dict[tuple[int, int], torch.Tensor] = {
            member: torch.empty(count, layout.page_bytes, dtype=torch.uint8, device=device)
            for group, count in zip(groups, num_blocks, strict=True)
            for member, layout in zip(group.members, group.layouts, strict=True)
        }

    def views(self, spec: ModelSpec) -> list[tuple[PageViews | SegmentViews | None, ...]]:
        """Views of each part of each layer of `spec`, None for a part that owns nothing."""
        by_member = {
            member: part_views(self.buffers[member], layout)
            for group in self.groups
            for member, layout in zip(group.members, group.layouts, strict=True)
        }
        return [tuple(by_member.get((x.index, i)) for i in range(len(x.parts))) for x in spec.layers]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the distinct storages behind the buffers, as torch has them."""
        storages = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in self.buffers.values()}
        return sum(storages.values())

    def fill(self, value: int, group: int | None = None, blocks: Sequence[int] | None = None) -> None:
        """Sets every byte of the given pages (None: all) to `value`; 255 is NaN in every float format."""
        for i in range(len(self.groups)) if group is None else (group,):
            for member in self.groups[i].members:
                buffer = self.buffers[member]
                if blocks is None:
                    buffer.fill_(value)
                else:
                    buffer[torch.tensor(blocks, device=buffer.device)] = value
