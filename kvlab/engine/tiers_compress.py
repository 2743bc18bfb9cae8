"""Compress instead of evict: a preempted sequence waits in fewer bits, in a second, smaller pool on the same device.

Pages of one pool have one format, because one kernel reads a table of them. So the sequence's pages are encoded into a
pool with a layout of its own, and decoded when it runs again: row by row, whatever rows they are (keys and values,
latents, entries of several tokens, an indexer's keys). States wait as they are. That is lossy: from then on the sequence
reads what the format kept of its past, and its tokens may differ from those of a run without pressure. What it leaves
behind is shared with nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvlab.cache.tiers import HostSlots, Tiers
from kvlab.cache.tiers.tiers import Move
from kvlab.engine.storage import PagedStorage
from kvlab.ops.coded import pick
from kvlab.ops.views import PageViews, SegmentViews
from kvlab.quant import get_codec
from kvlab.specs.kv_dtypes import with_formats
from kvlab.specs.layout import Group
from kvlab.specs.model import ModelSpec
from kvlab.specs.pools import sectors_as_they_are

if TYPE_CHECKING:
    from kvlab.engine.engine import Engine

Views = PageViews | SegmentViews


class CompressedPages:
    """A pool in another storage format, and the copies between it and the engine's.

    Args:
        engine: with cache and storage. dtype: rule of storage formats of the waiting pages. num_bytes: of their pool.

    Raises:
        ValueError: formats that code several tokens together, in either pool; a model that keeps states alone; too few
            bytes.
    """

    def __init__(self, engine: Engine, dtype: str, num_bytes: int) -> None:
        spec = waiting_spec(engine, dtype)
        # one pool for the pages of all groups: what one does not need, another uses
        layout = sectors_as_they_are(waiting_groups(engine.groups, spec))
        self.slots = HostSlots(layout, num_bytes, layout.unit_bytes[0])
        units = self.slots.capacity_bytes // self.slots.unit_bytes
        self.storage = PagedStorage(layout, [units], engine.model.decoder.device)
        both = zip(engine.storage.views(engine.spec), self.storage.views(spec), strict=True)
        self._pairs = [pair for layers in both for pair in zip(*layers, strict=True) if pair != (None, None)]
        # slots count from the second unit on, the first one is nobody's
        self._first = layout.pages_per_unit

    def start(self, moves: Sequence[Move], down: bool) -> None:
        """Encodes pages into the small pool (`down`), or decodes them back. On the compute stream: done in its order."""
        for group in sorted({g for g, _, _ in moves}):
            self._start(group, [move[1:] for move in moves if move[0] == group], down)

    def _start(self, group: int, moves: Sequence[tuple[int, int]], down: bool) -> None:
        pages, slots = torch.tensor(moves, device=self._pairs[0][0].buffer.device).T
        slots = slots - self._first[group]
        for own, small in self._pairs:
            if own.group == group:
                source, target, here, there = (own, small, pages, slots) if down else (small, own, slots, pages)
                for segment in own.layout.segments:
                    if not segment.name.endswith("_scale"):
                        recode(source, target, segment.name, here, there)

    def done(self, ticket: None) -> bool:
        """Always: what comes later on the stream finds the copies made."""
        return True

    def wait(self, ticket: None) -> None:
        """Nothing to wait for."""

    def memory(self, group: int, slot: int) -> memoryview:
        """Not to be had: lossy pages are not saved."""
        raise NotImplementedError("compressed pages are not saved for others")


def waiting_spec(engine: Engine, dtype: str) -> ModelSpec:
    """What the engine's model caches while it waits: rows in the formats of the rule `dtype`, states as they are.

    Raises:
        ValueError: as `CompressedPages`, or a rule that does not fit the model.
    """
    try:
        spec = with_formats(engine.model.spec, dtype)
    except ValueError as error:
        raise ValueError(str(error).replace("kv_dtype", "park_dtype", 1)) from None
    for name, rule, found in (("park_dtype", dtype, spec), ("kv_dtype", engine.kv_dtype, engine.spec)):
        if any(part.kind == "closed" for _, part in found.parts()):
            raise ValueError(
                f"{name} {rule!r}: codes several tokens together, and pages are encoded to wait row by row: "
                "name formats of single rows, as int8 or int4"
            )
    if not any(hasattr(part, "format") for _, part in spec.parts()):
        raise ValueError(f"park_dtype {dtype!r}: the model keeps states alone, which are not re-encoded: leave it out")
    return spec


def waiting_groups(groups: Sequence[Group], spec: ModelSpec) -> list[Group]:
    """`groups`, of as many tokens a page, with the parts that `spec` has in their place."""
    layers = {layer.index: layer for layer in spec.layers}
    parts = [tuple(layers[layer].parts[part] for layer, part in group.members) for group in groups]
    return [replace(group, parts=own).resized(group.block_size) for group, own in zip(groups, parts, strict=True)]


def recode(source: Views, target: Views, name: str, here: torch.Tensor, there: torch.Tensor) -> None:
    """Segment `name` of pages `there` of `target` becomes that of pages `here` of `source`, row by row in the target's
    format. Where both have one format the bytes are copied, as of all states."""
    (codes, meta), (own, own_meta) = _stored(source, name), _stored(target, name)
    before, after = source.layout[name], target.layout[name]
    new, new_meta = pick(codes, here), None if meta is None else pick(meta, here)
    if before.format != after.format:
        new, new_meta = get_codec(after.format).encode(get_codec(before.format).decode(new, new_meta, before.width))
    _put(own, there, new)
    if own_meta is not None:
        _put(own_meta, there, new_meta)


def _stored(views: Views, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes of a segment, and their metadata."""
    if isinstance(views, PageViews):
        return getattr(views, name), getattr(views, f"{name}_scale")
    return views[name], views.segments.get(f"{name}_scale")


def compressing_tiers(engine: Engine, dtype: str, num_bytes: int) -> Tiers:
    """Tiers that hold preempted sequences in another format and save nothing.

    Raises:
        ValueError: as `CompressedPages`.
    """
    pages = CompressedPages(engine, dtype, num_bytes)
    return Tiers(engine.cache, pages.slots, pages, saves=False, lossy=dtype)


def _put(stored: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> None:
    """stored[index] = new; fp8 has no indexed copy on every device, so bytes are moved."""
    new = new.to(stored.dtype)
    if stored.dtype.itemsize == 1:
        stored, new = stored.view(torch.uint8), new.view(torch.uint8)
    stored[index] = new
