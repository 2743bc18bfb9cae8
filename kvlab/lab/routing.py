"""Requests over replicas that each cache prefixes of their own: who gets which request, and how often it hits.

Bookkeeping alone: a replica is a least-recently-used set of page names, as large as its pool; nothing is computed.
"""

from __future__ import annotations

import bisect
import hashlib
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Arrival:
    """A request: `shared` pages of the prefix `prefix` that others begin with too, then `own` pages of its own."""

    number: int
    prefix: str
    shared: int
    own: int

    @property
    def pages(self) -> list[tuple[str, int]]:
        """Names of its pages, in order: equal names are equal prefixes up to there."""
        mine = f"{self.prefix} {self.number}"
        return [(self.prefix, i) for i in range(self.shared)] + [(mine, i) for i in range(self.own)]


@dataclass
class Replica:
    """One engine's prefix cache of `capacity` pages.

    Attributes:
        requests: how many it got. asked, found: pages of their prompts, and those it had.
    """

    name: str
    capacity: int
    requests: int = 0
    asked: int = 0
    found: int = 0
    cached: OrderedDict[tuple[str, int], None] = field(default_factory=OrderedDict)

    def matched(self, arrival: Arrival) -> int:
        """Pages of the prompt that are cached, from its start on and without a gap."""
        count = 0
        for page in arrival.pages:
            if page not in self.cached:
                break
            count += 1
        return count

    def serve(self, arrival: Arrival) -> int:
        """Pages of the prompt that were found; all of them are cached from now on, the oldest others leave."""
        found = self.matched(arrival)
        # the last page first: what is behind a gap is of no use, so ends leave before beginnings
        for page in reversed(arrival.pages):
            self.cached[page] = None
            self.cached.move_to_end(page)
        while len(self.cached) > self.capacity:
            self.cached.popitem(last=False)
        self.requests, self.asked, self.found = self.requests + 1, self.asked + len(arrival.pages), self.found + found
        return found

    @property
    def hit_rate(self) -> float:
        """The share of prompt pages that were found."""
        return self.found / self.asked if self.asked else 0.0


Router = Callable[[Arrival, Sequence[Replica]], Replica]


def round_robin(arrival: Arrival, replicas: Sequence[Replica]) -> Replica:
    """Everybody in turn."""
    return replicas[arrival.number % len(replicas)]


def longest_match(arrival: Arrival, replicas: Sequence[Replica]) -> Replica:
    """Who has most of the prompt; of equals, who got the fewest requests so far."""
    return max(replicas, key=lambda replica: (replica.matched(arrival), -replica.requests))


class HashRing:
    """Consistent hashing: each replica owns the arcs of a ring that end in one of its `points`.

    Args:
        slack: how far above the average a replica may go before its requests pass to the next on the ring; None: any.

    Source: Karger and others, STOC 1997; with a bound on load, Mirrokni and others, arXiv:1608.01350.
    """

    def __init__(self, names: Sequence[str], points: int = 64, slack: float | None = None) -> None:
        self.slack = slack
        self._ring = sorted((_place(f"{name}#{i}"), name) for name in names for i in range(points))

    def owners(self, key: str) -> list[str]:
        """Every replica once, in the order in which the ring meets them from `key` on."""
        start = bisect.bisect(self._ring, (_place(key), ""))
        return list(dict.fromkeys(name for _, name in self._ring[start:] + self._ring[:start]))

    def __call__(self, arrival: Arrival, replicas: Sequence[Replica]) -> Replica:
        """The replica that owns the prefix, or the next one on the ring that is not overloaded."""
        named = {replica.name: replica for replica in replicas}
        total = sum(replica.requests for replica in replicas) + 1
        for name in self.owners(arrival.prefix):
            replica = named[name]
            if self.slack is None or replica.requests < (1 + self.slack) * total / len(replicas):
                return replica
        raise AssertionError("no replica is at or below the average")


def _place(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def arrivals(count: int, prefixes: int, *, shared: int, own: int, skew: float = 1.0, seed: int = 0) -> list[Arrival]:
    """`count` requests over `prefixes` prefixes; the n-th most popular one is asked for 1 / n**skew as often."""
    rng = random.Random(seed)
    weights = [1 / (n + 1) ** skew for n in range(prefixes)]
    picked = rng.choices(range(prefixes), weights, k=count)
    return [Arrival(i, f"prefix {n}", shared, own) for i, n in enumerate(picked)]


def replay(requests: Sequence[Arrival], router: Router, names: Sequence[str], capacity: int) -> list[Replica]:
    """The replicas after every request went where the router sends it."""
    replicas = [Replica(name, capacity) for name in names]
    for arrival in requests:
        router(arrival, replicas).serve(arrival)
    return replicas


def hit_rate(replicas: Sequence[Replica]) -> float:
    """The share of all prompt pages that were found, over all replicas."""
    return sum(r.found for r in replicas) / max(1, sum(r.asked for r in replicas))


def imbalance(replicas: Sequence[Replica]) -> float:
    """The most requests that one replica got over their average: 1 is even."""
    return max(r.requests for r in replicas) * len(replicas) / max(1, sum(r.requests for r in replicas))
