"""Kept states: copies of a state's pages at the lengths that the policy names, held by their request.

From one an earlier length is reached exactly: copy it back, and compute the tokens since then again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence

from kvlab.cache.pool import BlockPool
from kvlab.cache.sectors import SectorPages
from kvlab.specs.rollback import RollbackPolicy

PageCopy = tuple[int, int, int]
"""(group, source page, destination page): what storage must copy."""


class KeptStates:
    """The kept states of all requests.

    Args:
        policy: which lengths, and how many of them.
        pools: the pool of each state group, by group index; none for a model without states.
        limit: the most states of a request, instead of the policy's number; 0 is no limit.
    """

    def __init__(
        self, policy: RollbackPolicy, pools: Mapping[int, BlockPool | SectorPages], limit: int | None = None
    ) -> None:  # fmt: skip
        self.policy, self.pools = policy, dict(pools)
        self._limit = policy.checkpoints_kept if limit is None else limit
        # oldest first: length, and a page of each state group in their order
        self._kept: dict[str, list[tuple[int, list[int]]]] = {}

    def lengths(self, request_id: str) -> list[int]:
        """The lengths after which the request's state was kept, oldest first."""
        return [tokens for tokens, _ in self._kept.get(request_id, [])]

    def newest(self, request_id: str, tokens: int) -> dict[int, int]:
        """For each state group the page of the request's newest state, if that is after `tokens` tokens; else none."""
        kept = self._kept.get(request_id)
        return dict(zip(self.pools, kept[-1][1], strict=True)) if kept and kept[-1][0] == tokens else {}

    def extra_pages(self, request_id: str, tokens: int) -> int:
        """Pages of each state group that keeping the state after `tokens` tokens takes beyond what is held.

        None where the oldest state makes way, unless a copy on its way down still reads that: its page stays.
        """
        if self._is_kept(request_id, tokens):
            return 0
        oldest = self._kept[request_id][0][1] if self._is_full(request_id) else ()
        alone = [pool.references[page] == 1 for pool, page in zip(self.pools.values(), oldest, strict=False)]
        return 0 if alone and all(alone) else 1

    def take(self, request_id: str, tokens: int) -> None:
        """Takes a page of each state group for the state after `tokens` tokens; the oldest goes when none more may be.

        The caller has made sure that pools have them, and copies the state once it is computed.
        """
        if not self.pools or self._is_kept(request_id, tokens):
            return
        kept = self._kept.setdefault(request_id, [])
        if self._is_full(request_id):
            self._drop(kept.pop(0))
        kept.append((tokens, [pool.allocate(1)[0] for pool in self.pools.values()]))

    def drop_after(self, request_id: str, tokens: int = -1) -> int:
        """Pages given back by forgetting the request's states of more than `tokens` tokens."""
        kept, given_back = self._kept.get(request_id, []), 0
        while kept and kept[-1][0] > tokens:
            given_back += self._drop(kept.pop())
        if not kept:
            self._kept.pop(request_id, None)
        return given_back

    def copies(self, request_id: str, tokens: int, tables: Sequence[array[int]], restore: bool) -> tuple[PageCopy, ...]:
        """What to copy to keep the state after `tokens` tokens, or to restore it; () when none is kept of that length.

        The newest copy is the one that is made or restored.
        """
        kept = self._kept.get(request_id, [])
        if not kept or kept[-1][0] != tokens:
            return ()
        pairs = [(g, tables[g][0], page) for g, page in zip(self.pools, kept[-1][1], strict=True)]
        return tuple((g, copy, own) if restore else (g, own, copy) for g, own, copy in pairs)

    def pages(self, request_id: str | None = None) -> Iterator[tuple[int, int]]:
        """(group, page) of every kept state, of one request or of all."""
        found = self._kept.values() if request_id is None else [self._kept.get(request_id, [])]
        for kept in found:
            for _, pages in kept:
                yield from zip(self.pools, pages, strict=True)

    def _is_kept(self, request_id: str, tokens: int) -> bool:
        kept = self._kept.get(request_id)
        return bool(kept) and kept[-1][0] == tokens  # type: ignore[index]

    def _is_full(self, request_id: str) -> bool:
        return bool(self._limit) and len(self._kept.get(request_id, [])) >= self._limit

    def _drop(self, state: tuple[int, list[int]]) -> int:
        for pool, page in zip(self.pools.values(), state[1], strict=True):
            pool.free([page])
        return len(state[1])
