"""From parts to pages: the segments of a page, and the groups whose parts share a block table.

A page of a part holds the codes of all its rows first, then scales and zero points, then outliers. Every segment
starts at a multiple of 16 bytes and every row is padded to 16, so a kernel may always load 16 bytes; padding is counted, not hidden.
Inside a segment the order is [heads, tokens, row]: the tokens of one head are contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvlab.specs.formats import align
from kvlab.specs.model import ModelSpec
from kvlab.specs.parts import CacheSpec, Retention


@dataclass(frozen=True)
class Segment:
    """One typed array inside a page, of shape [heads, tokens, width] (scales: [heads, tokens, groups]).

    Attributes:
        name: "k", "v", "latent", "k_scale", ...
        offset: bytes from the start of the page, a multiple of 16.
        heads, tokens, width: its shape, in values.
        row_bytes: bytes from one token's row to the next (padded for codes, packed for scales).
        used_bytes: bytes of a row that carry data.
        format: storage format name for codes, "fp32"-like element type for scales.
    """

    name: str
    offset: int
    heads: int
    tokens: int
    width: int
    row_bytes: int
    used_bytes: int
    format: str

    @property
    def size_bytes(self) -> int:
        """Bytes from this segment's start to its last row's end."""
        return self.heads * self.tokens * self.row_bytes


@dataclass(frozen=True)
class PageLayout:
    """How one page of one part is laid out. `page_bytes` includes all padding."""

    block_size: int
    segments: tuple[Segment, ...]
    page_bytes: int

    @property
    def used_bytes(self) -> int:
        """Bytes of a full page that carry data."""
        return sum(s.heads * s.tokens * s.used_bytes for s in self.segments)

    @property
    def padding_bytes(self) -> int:
        """Bytes of a page that never carry data."""
        return self.page_bytes - self.used_bytes

    def __getitem__(self, name: str) -> Segment:
        return next(s for s in self.segments if s.name == name)


def page_layout(part: CacheSpec, block_size: int) -> PageLayout:
    """The layout of a page of `block_size` entries of `part` (of one sequence's state for a state part)."""
    if part.retention.rule == "state":
        return _state_layout(part)
    segments: list[Segment] = []
    offset = 0

    def add(name: str, heads: int, width: int, row: int, used: int, fmt: str) -> None:
        nonlocal offset
        segments.append(Segment(name, offset, heads, block_size, width, row, used, fmt))
        offset = align(offset + heads * block_size * row)

    def add_codes(outliers: bool) -> None:
        for r in part.rows():
            if r.name.endswith("_outliers") == outliers:
                used = r.format.code_bytes(r.width)
                add(r.name, r.heads, r.width, align(used), used, r.format.name)

    add_codes(outliers=False)
    for r in part.rows():
        if meta := r.format.meta_bytes(r.width):
            groups = meta // r.format.scale_bytes
            add(f"{r.name}_scale", r.heads, groups, meta, meta, f"scale{r.format.scale_bytes}")
    add_codes(outliers=True)
    return PageLayout(block_size, tuple(segments), offset)


def _state_layout(part: CacheSpec) -> PageLayout:
    segments, offset = [], 0
    for array in part.arrays:  # type: ignore[attr-defined]
        size = array.array_bytes
        segments.append(Segment(array.name, offset, 1, 1, array.elements, size, size, array.format.name))
        offset = align(offset + size)
    return PageLayout(1, tuple(segments), offset)


@dataclass(frozen=True)
class Group:
    """Parts of equal retention: one block table, one page id per block in each layer's own buffer.

    Attributes:
        name: "full", "sliding512", ... for tables and messages.
        retention: the rule its parts share.
        block_size: tokens that a block covers; a state's covers the whole sequence.
        members: (layer index, part index) of each part, in layer order.
        layouts: page layout of each member, in the same order.
        parts: what each member caches, in the same order.
    """

    name: str
    retention: Retention
    block_size: int
    members: tuple[tuple[int, int], ...]
    layouts: tuple[PageLayout, ...]
    parts: tuple[CacheSpec, ...] = ()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: a page in each of its layers."""
        return sum(layout.page_bytes for layout in self.layouts)

    def resized(self, block_size: int) -> Group:
        """The group with blocks of `block_size` tokens.

        Raises:
            ValueError: not a multiple of the compression ratio.
        """
        entries = _entries(self.retention, block_size)
        layouts = tuple(page_layout(part, entries) for part in self.parts)
        return replace(self, block_size=block_size, layouts=layouts)


def group_parts(model: ModelSpec, block_size: int) -> tuple[Group, ...]:
    """The groups of `model`, those that keep everything first, then windows, chunks, strides, states.

    Raises:
        ValueError: block_size not positive, or not a multiple of a compression ratio.
    """
    if block_size <= 0:
        raise ValueError(f"block_size {block_size}: must be a positive number of tokens")
    return tuple(_group(model, rule, members, block_size) for rule, members in _by_retention(model))


def part_groups(model: ModelSpec) -> dict[tuple[int, int], int]:
    """(layer index, part index) -> index of its group in `group_parts`, of every part that owns entries."""
    return {member: i for i, (_, members) in enumerate(_by_retention(model)) for member in members}


def _by_retention(model: ModelSpec) -> list[tuple[Retention, list[tuple[int, int]]]]:
    found: dict[Retention, list[tuple[int, int]]] = {}
    for layer in model.layers:
        for i, part in enumerate(layer.parts):
            if part.retention.rule != "none":
                found.setdefault(part.retention, []).append((layer.index, i))
    order = {"all": 0, "window": 1, "chunk": 2, "stride": 3, "encoder": 4, "state": 5}
    return sorted(found.items(), key=lambda item: (order[item[0].rule], item[0].size, item[0].sinks))


def retention_name(rule: Retention) -> str:
    """The name of the group that keeps by `rule`: "full", "sliding512", "sliding512+4sinks", "chunked8192",
    "compressed4", "state"."""
    names = {"all": "full", "window": "sliding", "chunk": "chunked", "stride": "compressed"}
    size = str(rule.size) if rule.size else ""
    return names.get(rule.rule, rule.rule) + size + (f"+{rule.sinks}sinks" if rule.sinks else "")


def _entries(rule: Retention, block_size: int) -> int:
    """Entries on a page that covers `block_size` tokens."""
    if rule.rule != "stride":
        return block_size
    entries, rest = divmod(block_size, rule.size)
    if rest or not entries:
        raise ValueError(
            f"block_size {block_size}: must be a multiple of {rule.size}, the tokens of an entry (a compression ratio, or a "
            "format's group)"
        )
    return entries


def _group(model: ModelSpec, rule: Retention, members: list[tuple[int, int]], block_size: int) -> Group:
    by_index = {layer.index: layer for layer in model.layers}
    parts = tuple(by_index[i].parts[j] for i, j in members)
    return Group(retention_name(rule), rule, block_size, tuple(members), (), parts).resized(block_size)
