"""A model as the cache sees it: layers, each a tuple of parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvlab.specs.parts import CacheSpec


@dataclass(frozen=True)
class LayerSpec:
    """One layer: none, one or several parts. Its kind for people is the kinds of its parts joined by "+"."""

    index: int
    parts: tuple[CacheSpec, ...]

    @property
    def kind(self) -> str:
        """Such as "full", "sliding", "mla+index", or "none"."""
        return "+".join(part.kind for part in self.parts) or "none"


@dataclass(frozen=True)
class ModelSpec:
    """What the planner, the allocator and the engine need to know of a model's cache.

    Attributes:
        name: for people.
        model_type: as the config states it (for a multimodal wrapper, the wrapper's).
        layers: every decoder layer in order, also those that cache nothing.
        hidden_size, num_query_heads, vocab_size: of the text model; 0 where there is none or none is stated.
        max_position: longest position the model was made for, None when unbounded or unstated.
        notes: assumptions a reader of a plan must see.
    """

    name: str
    model_type: str
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    num_query_heads: int
    vocab_size: int
    max_position: int | None = None
    notes: tuple[str, ...] = ()

    def parts(self) -> Iterator[tuple[int, CacheSpec]]:
        """(layer index, part) for every part of every layer."""
        for layer in self.layers:
            for part in layer.parts:
                yield layer.index, part

    def bytes_at(self, tokens: int, *, buffers: bool = False) -> int:
        """Bytes of one sequence of `tokens` tokens, nothing rounded to pages.

        Open compression buffers are left out unless `buffers`.
        """
        return sum(p.bytes_at(tokens) for _, p in self.parts() if buffers or p.kind != "buffer")

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state of one sequence."""
        return sum(p.fixed_bytes for _, p in self.parts() if p.kind == "recurrent")

    @property
    def buffer_bytes(self) -> int:
        """Bytes of open compression buffers of one sequence."""
        return sum(p.fixed_bytes for _, p in self.parts() if p.kind == "buffer")

    @property
    def bytes_per_token(self) -> int | float:
        """Bytes one more token adds above every window, averaged over compression ratios."""
        return _whole(sum(p.slope() for _, p in self.parts()))

    @property
    def bytes_per_token_short(self) -> int | float:
        """Bytes one more token adds below every window."""
        return _whole(sum(p.slope(0) for _, p in self.parts()))

    def per_rank(self, tp: int) -> ModelSpec:
        """The model as one of `tp` tensor-parallel ranks caches it."""
        return replace(
            self,
            layers=tuple(LayerSpec(x.index, tuple(p.per_rank(tp) for p in x.parts)) for x in self.layers),
        )


def _whole(value: int | float) -> int | float:
    return int(value) if value == int(value) else value
