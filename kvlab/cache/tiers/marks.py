"""The lengths at which running requests are saved: where others that begin alike may go on.

They are those that the prefix cache keeps states for: the last page end inside a prompt, where a prompt leaves what was
known before it, every `checkpoint_tokens`. What was known before is known here across restarts, so that a beginning
which only one request had so far is saved when the second one leaves it, even if the first was another process'.
"""

from __future__ import annotations

from kvlab.cache.manager import KVCacheManager
from kvlab.cache.prefix import PrefixOptions


class Marks:
    """The lengths at which each live request is saved.

    Args:
        cache: its prefix options are the policy; without a prefix cache, their defaults. unit: lengths are its multiples.
    """

    def __init__(self, cache: KVCacheManager, unit: int) -> None:
        self.cache, self.unit = cache, unit
        self.options = cache.prefix.options if cache.prefix else PrefixOptions()
        self._junctions: dict[str, int] = {}

    def leaves(self, request_id: str, known: int) -> None:
        """The request leaves what was saved of others behind its first `known` tokens."""
        if self.options.junctions:
            self._junctions[request_id] = known

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._junctions.pop(request_id, None)

    def next_after(self, request_id: str, computed: int, num_prompt: int) -> int | None:
        """The first length above `computed` at which the request is saved; None when there is none."""
        found = [self._junctions.get(request_id), self.options.next_after(computed, num_prompt, self.unit)]
        if self.cache.prefix:
            found.append(self.cache.prefix.keep_after(request_id, computed))
        return min((n for n in found if n and n > computed), default=None)
