"""How prefixes are cached: the design of the index, who is evicted, which states are kept for others to start from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

DESIGNS = ("hash", "radix")
EVICTIONS = ("lru", "lfu", "ttl", "fifo", "priority")


def sha256_digest(data: bytes) -> bytes:
    """32 bytes that no two histories share, as far as anybody can find out."""
    return sha256(data).digest()


@dataclass(frozen=True)
class PrefixOptions:
    """How prefixes are cached.

    Attributes:
        design: "hash" keys every page by a digest of its whole history; "radix" keeps histories in a tree of runs.
            Both find the same prefixes.
        eviction: which cached page that nobody holds goes first. "lru": the one unused for longest. "lfu": the one hit
            least often. "ttl": the one unused for longest, and every one unused for `ttl` seconds. "fifo": the one
            inserted first; what is extended counts as inserted again. "priority": the one whose most urgent user had
            the highest `priority` number. Of equals, the one unused for longest; of one sequence, its end first.
        ttl: seconds that an unused page stays under "ttl".
        digest: 32 bytes of any bytes; another function than sha256 is for tests of what collisions do, and its first
            digest is another one in each process.
        checkpoint_prompt: states are kept at the last page end inside a prompt, before its last token.
        junctions: states are kept where a prompt leaves a history that an earlier one had too.
        checkpoint_tokens: states are kept at multiples of this besides, rounded up to a page end; 0: never.

    Raises:
        ValueError: an unknown name, or a number out of its range.
    """

    design: str = "hash"
    eviction: str = "lru"
    ttl: float = 60.0
    digest: Callable[[bytes], bytes] = sha256_digest
    checkpoint_prompt: bool = True
    junctions: bool = True
    checkpoint_tokens: int = 0

    def __post_init__(self) -> None:
        for name, known in (("design", DESIGNS), ("eviction", EVICTIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r}: must be one of {', '.join(known)}")
        if not self.ttl > 0:
            raise ValueError(f"ttl {self.ttl}: must be a positive number of seconds")
        if self.checkpoint_tokens < 0:
            raise ValueError(f"checkpoint_tokens {self.checkpoint_tokens}: must be 0 or positive")

    def next_after(self, computed: int, num_prompt: int, unit: int) -> int | None:
        """The first length above `computed` after which states are kept whatever else is known, at page ends `unit` tokens
        apart; None when there is none."""
        found = [(num_prompt - 1) // unit * unit] if self.checkpoint_prompt else []
        if self.checkpoint_tokens:
            every = -(-self.checkpoint_tokens // unit) * unit
            found.append((computed // every + 1) * every)
        return min((n for n in found if n > computed), default=None)
