"""What the prefix cache says of a request, counts, and keeps of live ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvlab.cache.prefix.index import Handle, Path
from kvlab.cache.prefix.keys import History


class Hit(NamedTuple):
    """What the cache has of a request.

    Attributes:
        tokens: that need not be computed.
        tables: for each group the pages of these tokens by position, 0 where none is needed; none for states.
        states: for each group of states the page with the copy to start from.
        known: tokens of the prompt that the index knows at all, whether or not all groups can go on from there.
    """

    tokens: int
    tables: tuple[Sequence[int], ...]
    states: dict[int, int]
    known: int
    history: History
    path: Path
    version: int
    num_prompt: int = 0
    priority: int = 0


@dataclass
class Counters:
    """Since the start, in tokens and pages. A request counts once, when it is first admitted.

    Attributes:
        requests, queries, hits: requests, their tokens at admission, and those of them that were hits.
        again_queries, again_hits: the same of requests that came back after they lost their pages.
        inserted, adopted, evicted: pages put in; pages given back for another's of the same history; pages dropped.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    again_queries: int = 0
    again_hits: int = 0
    inserted: int = 0
    adopted: int = 0
    evicted: int = 0

    @property
    def hit_rate(self) -> float:
        """Hit tokens over asked tokens, of first admissions."""
        return self.hits / self.queries if self.queries else 0.0


@dataclass
class Standing:
    """A live request in the prefix cache. `junction`: a length after which its state is kept, 0: none."""

    history: History
    handle: Handle
    num_prompt: int
    priority: int
    junction: int = 0
    has_inserted: bool = False
