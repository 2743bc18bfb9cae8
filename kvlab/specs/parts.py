"""The parts of a layer: one frozen `CacheSpec` for each thing a layer keeps between steps.

A spec owns its arithmetic. Asked for a length it answers in exact bytes; asked for a rank it answers
with the spec of what that rank holds. Planner, allocator, engine, widget and book all ask the spec.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from kvlab.specs.cache_spec import CacheSpec, Retention, Row, heads_per_rank
from kvlab.specs.formats import StorageFormat

__all__ = [
    "Attention", "CacheSpec", "ChunkedLocal", "CompressedEntries", "CrossAttention", "IndexKeys", "MLALatent",
    "OpenBuffer", "RecurrentState", "Retention", "Row", "Shared", "SharedKV", "SlidingWindow", "StateArray",
    "heads_per_rank",
]  # fmt: skip


@dataclass(frozen=True)
class Attention(CacheSpec):
    """Keys and values of `num_kv_heads` heads for every token: MHA, GQA and MQA alike."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    format: StorageFormat
    kind: ClassVar[str] = "full"

    @property
    def retention(self) -> Retention:
        return Retention("all")

    def rows(self) -> tuple[Row, ...]:
        heads, fmt = self.num_kv_heads, self.format
        return (Row("k", heads, self.key_dim, fmt), Row("v", heads, self.value_dim, fmt))

    def per_rank(self, tp: int) -> CacheSpec:
        return replace(self, num_kv_heads=heads_per_rank(self.num_kv_heads, tp))


@dataclass(frozen=True)
class SlidingWindow(Attention):
    """Keys and values of the last `window` tokens: a query at position t sees t - window + 1 .. t."""

    window: int = 0
    sinks: int = 0
    kind: ClassVar[str] = "sliding"

    @property
    def retention(self) -> Retention:
        return Retention("window", self.window, self.sinks)


@dataclass(frozen=True)
class ChunkedLocal(Attention):
    """Keys and values of the current chunk: a query at t sees (t // chunk) * chunk .. t."""

    chunk: int = 0
    kind: ClassVar[str] = "chunked"

    @property
    def retention(self) -> Retention:
        return Retention("chunk", self.chunk)


@dataclass(frozen=True)
class CrossAttention(Attention):
    """Keys and values of `encoder_tokens` tokens of an encoder, fixed once it has run."""

    encoder_tokens: int = 0
    kind: ClassVar[str] = "cross"

    @property
    def retention(self) -> Retention:
        return Retention("encoder")

    @property
    def fixed_bytes(self) -> int:
        return self.encoder_tokens * self.entry_bytes


@dataclass(frozen=True)
class MLALatent(CacheSpec):
    """One compressed latent and one rotary key per token, shared by all heads; replicated under TP."""

    latent_dim: int
    rope_dim: int
    format: StorageFormat
    kind: ClassVar[str] = "mla"

    @property
    def retention(self) -> Retention:
        return Retention("all")

    def rows(self) -> tuple[Row, ...]:
        return (Row("latent", 1, self.latent_dim, self.format), Row("rope", 1, self.rope_dim, self.format))


@dataclass(frozen=True)
class SharedKV(CacheSpec):
    """One vector per token that serves as key and value, for the last `window` tokens (DeepSeek-V4)."""

    width: int
    window: int
    format: StorageFormat
    kind: ClassVar[str] = "sliding"

    @property
    def retention(self) -> Retention:
        return Retention("window", self.window)

    def rows(self) -> tuple[Row, ...]:
        return (Row("kv", 1, self.width, self.format),)


@dataclass(frozen=True)
class CompressedEntries(CacheSpec):
    """One entry per `ratio` tokens, written when its window of tokens is complete."""

    ratio: int
    width: int
    format: StorageFormat
    kind: ClassVar[str] = "compressed"

    @property
    def retention(self) -> Retention:
        return Retention("stride", self.ratio)

    def rows(self) -> tuple[Row, ...]:
        return (Row("entry", 1, self.width, self.format),)


@dataclass(frozen=True)
class IndexKeys(CacheSpec):
    """The keys an indexer scores, one per `ratio` tokens (1: per token)."""

    width: int
    format: StorageFormat
    ratio: int = 1
    kind: ClassVar[str] = "index"

    @property
    def retention(self) -> Retention:
        return Retention("all") if self.ratio == 1 else Retention("stride", self.ratio)

    def rows(self) -> tuple[Row, ...]:
        return (Row("index", 1, self.width, self.format),)


@dataclass(frozen=True)
class StateArray:
    """One array of a fixed state: for each (units, values per unit), `columns` copies, in `format`.

    The units are what tensor parallelism splits (heads, groups, channels); fewer units than ranks
    are replicated.
    """

    name: str
    units: tuple[tuple[int, int], ...]
    columns: int
    format: StorageFormat

    @property
    def elements(self) -> int:
        """Values in the array."""
        return sum(count * width for count, width in self.units) * self.columns

    @property
    def array_bytes(self) -> int:
        """Bytes of the array."""
        return self.format.code_bytes(self.elements)

    def per_rank(self, tp: int) -> StateArray:
        """The array on one of `tp` ranks."""
        return replace(self, units=tuple((max(1, -(-count // tp)), width) for count, width in self.units))


@dataclass(frozen=True)
class RecurrentState(CacheSpec):
    """A state of fixed size per sequence: convolution inputs and recurrent matrices.

    `mechanism` names the recurrence (mamba1, mamba2, gated_delta, kda, short_conv, lightning, ...).
    """

    mechanism: str
    arrays: tuple[StateArray, ...]
    kind: ClassVar[str] = "recurrent"

    @property
    def retention(self) -> Retention:
        return Retention("state")

    @property
    def fixed_bytes(self) -> int:
        return sum(array.array_bytes for array in self.arrays)

    def per_rank(self, tp: int) -> CacheSpec:
        return replace(self, arrays=tuple(array.per_rank(tp) for array in self.arrays))


@dataclass(frozen=True)
class OpenBuffer(CacheSpec):
    """Inputs of a compression window of `ratio` tokens that is not complete yet (DeepSeek-V4), per sequence.

    Each input has the place of its token in the window, so tokens of the open window can be forgotten; what a
    complete window left behind cannot.
    """

    arrays: tuple[StateArray, ...]
    ratio: int = 1
    kind: ClassVar[str] = "buffer"

    @property
    def retention(self) -> Retention:
        return Retention("state")

    @property
    def fixed_bytes(self) -> int:
        return sum(array.array_bytes for array in self.arrays)

    def earliest(self, tokens: int) -> int:
        return tokens // self.ratio * self.ratio


@dataclass(frozen=True)
class Shared(CacheSpec):
    """Reads the cache of layer `source`; owns nothing."""

    source: int
    kind: ClassVar[str] = "shared"

    @property
    def retention(self) -> Retention:
        return Retention("none")
