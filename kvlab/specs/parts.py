"""The parts of a layer: one frozen `CacheSpec` for each thing a layer keeps between steps.

A spec owns its arithmetic. Asked for a length it answers in exact bytes; asked for a rank it answers
with the spec of what that rank holds. Planner, allocator, engine, widget and book all ask the spec.

Two lengths are kept apart: `entries(n)` is the most rows ever held on the way to `n` tokens (what
memory must be there for), `retained(n)` what is still held after them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from kvlab.specs.formats import StorageFormat


@dataclass(frozen=True)
class Retention:
    """Which entries a part keeps. Parts with equal retention share a block table.

    Attributes:
        rule: "all" (every token), "window" (the last `size`), "chunk" (the current chunk of `size`),
            "stride" (one entry per `size` tokens), "encoder" (the encoder's tokens), "state" (no entries),
            "none" (owns nothing).
        size: tokens, as the rule says.
        sinks: first tokens that a window keeps for ever.
    """

    rule: str
    size: int = 0
    sinks: int = 0


@dataclass(frozen=True)
class Row:
    """What one entry stores under one name: `heads` vectors of `width` values in `format`."""

    name: str
    heads: int
    width: int
    format: StorageFormat

    @property
    def row_bytes(self) -> int:
        """Bytes of this row, codes and scales of all heads, without padding."""
        return self.heads * self.format.row_bytes(self.width)


@dataclass(frozen=True)
class CacheSpec:
    """Base of all parts; see the module's docstring for the two lengths."""

    kind: ClassVar[str] = ""

    @property
    def retention(self) -> Retention:
        """The rule that says which entries stay."""
        raise NotImplementedError

    def rows(self) -> tuple[Row, ...]:
        """What one entry is made of; empty for parts that keep no entries."""
        return ()

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry, without padding."""
        return sum(row.row_bytes for row in self.rows())

    @property
    def fixed_bytes(self) -> int:
        """Bytes kept per sequence whatever its length."""
        return 0

    def entries(self, tokens: int) -> int:
        """The most entries held at once by a sequence that grows to `tokens` tokens."""
        rule = self.retention
        if rule.rule == "all":
            return tokens
        if rule.rule == "window":
            return min(tokens, rule.size + rule.sinks)
        if rule.rule == "chunk":
            return min(tokens, rule.size)
        if rule.rule == "stride":
            return tokens // rule.size
        return 0

    def retained(self, tokens: int) -> int:
        """Entries still held after `tokens` tokens, when dropping is immediate."""
        rule = self.retention
        if rule.rule == "chunk":
            return (tokens - 1) % rule.size + 1 if tokens else 0
        return self.entries(tokens)

    def bytes_at(self, tokens: int) -> int:
        """Bytes one layer of one sequence needs to grow to `tokens` tokens, without page rounding."""
        return self.entries(tokens) * self.entry_bytes + self.fixed_bytes

    def slope(self, tokens: int | None = None) -> int | float:
        """Bytes that one more token adds: for ever (`tokens` None), or below every window (`tokens` = 0)."""
        rule = self.retention
        if rule.rule == "all" or (rule.rule in ("window", "chunk") and tokens == 0):
            return self.entry_bytes
        if rule.rule == "stride":
            whole, rest = divmod(self.entry_bytes, rule.size)
            return whole if not rest else self.entry_bytes / rule.size
        return 0

    def per_rank(self, tp: int) -> CacheSpec:
        """The part that one of `tp` tensor-parallel ranks holds."""
        return self

    def earliest(self, tokens: int) -> int:
        """The shortest length to which a sequence of `tokens` tokens can be cut back by forgetting entries alone.

        As if what no later query reads were gone at once: a window that has slid, and a chunk that has ended, cannot
        be brought back; a state that has seen a token cannot unsee it. (Pages give entries back later than that, and
        a copy of a state reaches further: see `kvlab.cache.manager.KVCacheManager.truncate`.)
        """
        rule = self.retention
        if rule.rule == "window":
            return tokens if tokens >= rule.size + rule.sinks else 0
        if rule.rule == "chunk":
            return tokens // rule.size * rule.size
        return tokens if rule.rule == "state" else 0


def heads_per_rank(num_kv_heads: int, tp: int) -> int:
    """KV heads on each of `tp` ranks: split while it divides, replicated when there are more ranks than heads.

    Raises:
        ValueError: neither number divides the other.
    """
    if num_kv_heads % tp and tp % num_kv_heads:
        raise ValueError(f"tp {tp}: must divide, or be a multiple of, the {num_kv_heads} KV heads")
    return max(1, num_kv_heads // tp)


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
