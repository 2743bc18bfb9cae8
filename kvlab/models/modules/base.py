"""What every module gets: its place in the cache, and the step it runs in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvlab.models.facts import RopeFacts
from kvlab.models.rope import inverse_frequencies, rope_tables
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.grouped_views import GroupedViews
from kvlab.ops.rope import Angles
from kvlab.ops.write_kv import turns_keys
from kvlab.specs.layout import part_groups
from kvlab.specs.model import ModelSpec
from kvlab.specs.parts import Shared

Views = Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Place:
    """Where a module's entries lie: its layer, and the first of the layer's parts that is its own."""

    layer: int
    part: int = 0


class Positions:
    """Angles of every rotary rule of a model, by rule; frequencies are computed once."""

    def __init__(self, dtype: torch.dtype, device: torch.device, max_len: int = 0) -> None:
        self._dtype, self._device, self._max_len = dtype, device, max_len
        self._frequencies: dict[tuple[RopeFacts, int], Tensor] = {}

    def angles(self, positions: Tensor, rope: RopeFacts, head_dim: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, dim / 2] of `positions` [T] under `rope`."""
        key = (rope, head_dim)
        if key not in self._frequencies:
            frequencies = inverse_frequencies(rope, head_dim, self._dtype, self._max_len)
            self._frequencies[key] = frequencies.to(self._device)
        return rope_tables(positions, self._frequencies[key], self._dtype, rope.attention_factor)


class PageMap:
    """Which block table and which views belong to each part of each layer; a shared part has its source's."""

    def __init__(self, spec: ModelSpec) -> None:
        self._groups = part_groups(spec)
        self._sources = {
            (layer.index, i): part.source
            for layer in spec.layers
            for i, part in enumerate(layer.parts)
            if isinstance(part, Shared)
        }

    def owner(self, place: Place, part: int = 0) -> tuple[int, int]:
        """(layer, part) of the entries that the module at `place` reads as its part number `part`."""
        key = (place.layer, place.part + part)
        return (self._sources[key], part) if key in self._sources else key

    def group(self, owner: tuple[int, int]) -> int:
        """The index of the block table of a part that owns entries."""
        return self._groups[owner]


@dataclass
class StepContext:
    """One step, as modules see it.

    Attributes:
        ids: int64 [T]. positions: int64 [T].
        batches: one per block table. views: views of the cache, [layer][part].
        memory: what a layer leaves for later layers of the same step, under names of the family's own.
        deltas: the adapters of the step (`kvlab.models.adapters.Deltas`), None without any.
    """

    ids: Tensor
    batches: Sequence[AttentionBatch]
    views: Views
    pages: PageMap
    rotary: Positions
    memory: dict[Any, Any] = field(default_factory=dict)
    deltas: Any = None

    @property
    def positions(self) -> Tensor:
        """Position of each row in its sequence, int64 [T]."""
        return self.batches[0].positions

    def part(self, place: Place, part: int = 0) -> tuple[Any, AttentionBatch]:
        """(views, batch) of a part of the module at `place`."""
        owner = self.pages.owner(place, part)
        views = self.views[owner[0]][owner[1]]
        batch = self.batches[self.pages.group(owner) if views.group is None else views.group]
        return views, self._with_closed(batch, views) if isinstance(views, GroupedViews) else batch

    def _with_closed(self, batch: AttentionBatch, views: GroupedViews) -> AttentionBatch:
        """`batch` with the block table of the layer's closed groups beside its own; made once a step."""
        key = ("closed", views.group, views.closed.group)
        if key not in self.memory:
            self.memory[key] = replace(batch, closed=self.batches[views.closed.group].block_table)
        return self.memory[key]

    def angles(self, rope: RopeFacts, head_dim: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, dim / 2] of the step's rows, computed once a step."""
        key = ("angles", rope, head_dim)
        if key not in self.memory:
            self.memory[key] = self.rotary.angles(self.positions, rope, head_dim)
        return self.memory[key]

    @property
    def rows(self) -> Tensor:
        """0 .. T - 1, int64: each token has its own row of angles, so that no table bounds the positions."""
        if "rows" not in self.memory:
            self.memory["rows"] = torch.arange(len(self.ids), device=self.ids.device)
        return self.memory["rows"]

    def late_angles(self, rope: RopeFacts | None, head_dim: int, x: Tensor, views: Any) -> Angles | None:
        """By what the cache write turns keys like the rows `x`; None where they are turned before, or not at all."""
        if rope is None or not turns_keys(x, views):
            return None
        return Angles(*self.angles(rope, head_dim), self.rows, rope.interleaved)


@dataclass
class WholeContext:
    """One whole sequence without a cache, as the plain forward of each module sees it.

    Attributes:
        ids: int64 [T], from the sequence's start.
        layer: index of the layer that runs.
        memory: what a layer leaves for later layers, under names of the family's own.
        max_len: longest sequence that the model is run with, in tokens; 0 for any.
    """

    ids: Tensor
    layer: int = 0
    memory: dict[Any, Any] = field(default_factory=dict)
    max_len: int = 0

    @property
    def positions(self) -> Tensor:
        """0 .. T - 1."""
        return torch.arange(len(self.ids), device=self.ids.device)

    def angles(self, rope: RopeFacts, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, dim / 2]."""
        frequencies = inverse_frequencies(rope, head_dim, dtype, self.max_len)
        return rope_tables(self.positions, frequencies, dtype, rope.attention_factor)


Reference = Callable[[Any, Any, Tensor, WholeContext], Tensor]
