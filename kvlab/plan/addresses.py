"""How far 32-bit offsets reach in a pool: from which page on a kernel that multiplies in int32 reads another page, in silence.

A layer's buffer is one array of pages, and an element's offset in it is page id x elements of a page + the rest. kvlab's
kernels multiply in int64, which `tests/ops/test_kernel_addresses.py` holds; other engines' have not always
(vllm#50427, sglang#20389, SageAttention#386).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvlab.specs.formats import get_format
from kvlab.specs.layout import Group, PageLayout, group_parts
from kvlab.specs.model import ModelSpec

INT32_OFFSETS = 2**31
"""Elements from the start of a buffer that a signed 32-bit offset tells apart."""


@dataclass(frozen=True)
class Reach:
    """The limit of one group's block table.

    Attributes:
        group: its name.
        page_elements: elements from a page to the next, in the layer whose buffer has the most of them.
        int32_pages: pages, the null page among them, of which every element has an int32 offset.
        pool_pages: pages of the group that the memory free for the cache would hold alone.
    """

    group: str
    page_elements: int
    int32_pages: int
    pool_pages: int

    @property
    def needs_int64(self) -> bool:
        """Whether a pool of that memory can have pages beyond the limit."""
        return self.pool_pages > self.int32_pages


def page_elements(layout: PageLayout) -> int:
    """Elements from a page to the next, in the type of its narrowest codes; codes of fewer than 8 bits are bytes."""
    codes = [s for s in layout.segments if not s.format.startswith("scale")]
    return layout.page_bytes // min(max(1, get_format(s.format).bits // 8) for s in codes)


def reach(group: Group, free_bytes: int) -> Reach:
    """The limit of `group`, and how many of its pages `free_bytes` hold."""
    elements = max(page_elements(layout) for layout in group.layouts)
    return Reach(group.name, elements, INT32_OFFSETS // elements, max(0, free_bytes) // group.block_bytes)


def reaches(stages: Iterable[ModelSpec], block_size: int, free_bytes: int) -> tuple[Reach, ...]:
    """The limit of every group on the GPU of each pipeline stage; of groups of one name the one with the nearest limit."""
    found: dict[str, Reach] = {}
    for stage in stages:
        for one in (reach(group, free_bytes) for group in group_parts(stage, block_size)):
            known = found.setdefault(one.group, one)
            if known.pool_pages * one.int32_pages < one.pool_pages * known.int32_pages:
                found[one.group] = one
    return tuple(found.values())


def words(found: Iterable[Reach]) -> list[str]:
    """A sentence for every group whose pool goes beyond the limit."""
    return [
        f"group {one.group}: 32-bit offsets reach {one.int32_pages:,} pages of a layer, the memory would hold "
        f"{one.pool_pages:,}; a kernel has to multiply in 64 bits, as kvlab's do"
        for one in found
        if one.needs_int64
    ]
