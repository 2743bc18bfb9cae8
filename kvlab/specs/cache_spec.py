"""What every part of a layer answers: which entries stay, what one entry is made of, how many bytes that comes to.

Two lengths are kept apart: `entries(n)` is the most rows ever held on the way to `n` tokens (what
memory must be there for), `retained(n)` what is still held after them.
"""

from __future__ import annotations

from dataclasses import dataclass
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
