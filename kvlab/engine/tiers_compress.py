"""Compress instead of evict: a preempted sequence waits in fewer bits, in a second, smaller pool on the same device.

Pages of one pool have one format, because one kernel reads a table of them. So the sequence's pages are encoded into a
pool with a layout of its own, and decoded when it runs again. That is lossy: from then on it reads what the format kept
of its past, and its tokens may differ from those of a run without pressure. What it leaves behind is shared with nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvlab.cache.tiers import HostSlots, Tiers
from kvlab.cache.tiers.tiers import Move
from kvlab.engine.storage import PagedStorage
from kvlab.ops.coded import decode_rows, encode_rows
from kvlab.ops.views import PageViews
from kvlab.specs.kv_dtypes import with_formats
from kvlab.specs.model import ModelSpec
from kvlab.specs.pools import pool_layout

if TYPE_CHECKING:
    from kvlab.engine.engine import Engine


class CompressedPages:
    """A pool in another storage format, and the copies between it and the engine's.

    Args:
        engine: with cache and storage. dtype: storage format of the waiting pages. num_bytes: of their pool.

    Raises:
        ValueError: layers that keep other things than keys and values (latents, states), a format without a codec of
            rows, groups that the engine's pools cut in another way, too few bytes.
    """

    def __init__(self, engine: Engine, dtype: str, num_bytes: int) -> None:
        spec = with_formats(engine.model.spec, dtype)
        # one pool for the pages of all groups: what one does not need, another uses
        layout = pool_layout(spec, engine.groups[0].block_size, "sectors")
        self.slots = HostSlots(layout, num_bytes, layout.unit_bytes[0])
        units = self.slots.capacity_bytes // self.slots.unit_bytes
        self.storage = PagedStorage(layout, [units + 1], engine.model.decoder.device)
        self._pairs = _pairs(engine, self.storage, spec)
        if not self._pairs:
            raise ValueError(
                f"park_dtype {dtype!r}: needs keys and values coded row by row in every layer (full, window or chunk), "
                "and tables alike in both pools (pools 'per_kind')"
            )

    def start(self, moves: Sequence[Move], down: bool) -> None:
        """Encodes pages into the small pool (`down`), or decodes them back. On the compute stream: done in its order."""
        for group in sorted({g for g, _, _ in moves}):
            self._start(group, [move[1:] for move in moves if move[0] == group], down)

    def _start(self, group: int, moves: Sequence[tuple[int, int]], down: bool) -> None:
        pages, slots = torch.tensor(moves, device=self._pairs[0][0].buffer.device).T
        for own, small in self._pairs:
            if own.group != group:
                continue
            source, target, here, there = (own, small, pages, slots) if down else (small, own, slots, pages)
            for name in ("k", "v"):
                codes, meta = encode_rows(target, name, decode_rows(source, name, here))
                _put(getattr(target, name), there, codes)
                if meta is not None:
                    _put(getattr(target, f"{name}_scale"), there, meta)

    def done(self, ticket: None) -> bool:
        """Always: what comes later on the stream finds the copies made."""
        return True

    def wait(self, ticket: None) -> None:
        """Nothing to wait for."""

    def memory(self, group: int, slot: int) -> memoryview:
        """Not to be had: lossy pages are not saved."""
        raise NotImplementedError("compressed pages are not saved for others")


def _pairs(engine: Engine, storage: PagedStorage, spec: ModelSpec) -> list[tuple[PageViews, PageViews]]:
    """For each part its pages in the engine's pool and in `storage`; [] where a page of one is no page of the other."""
    own, small = ([(g.members, g.block_size) for g in groups] for groups in (engine.groups, storage.layout.groups))
    if own != small:
        return []
    both = zip(engine.storage.views(engine.spec), storage.views(spec), strict=True)
    pairs = [pair for layers in both for pair in zip(*layers, strict=True) if pair != (None, None)]
    plain = all(type(view) is PageViews and view.fixed is None for pair in pairs for view in pair)
    return pairs if plain else []


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
