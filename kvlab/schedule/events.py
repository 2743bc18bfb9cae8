"""The event log: every decision with its reason. Metrics, traces, the step-through widget and tests read it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

KINDS = {
    "arrive": "a request was accepted; tokens: its prompt",
    "refuse": "a request was turned away at arrival",
    "wait": "the first waiting request was not admitted",
    "admit": "a waiting request runs from now on; tokens: what it must compute before its next token",
    "hit": "an admitted request found tokens in the prefix cache; tokens: how many",
    "chunk": "a request was given tokens of a step; tokens: how many",
    "preempt": "a running request lost its pages and waits again; tokens: computed work thrown away, pages: given back",
    "swap_out": "a preempted request's pages moved to the tier below; tokens: computed and kept, pages: how many",
    "compress": "a preempted request's pages wait in fewer bits; tokens: computed and kept, pages: how many",
    "swap_in": "an admitted request's pages came back from below; tokens: that need not be computed, pages: how many",
    "save": "the prefix of a request that ended was written to the tiers; tokens, pages: how many",
    "load": "an admitted request found tokens in a lower tier, named before the colon; tokens, pages: how many",
    "expel": "saved pages that a request could have read whose numbers are not finite are found no more; pages: how many",
    "lost": "what a lower tier had, or was to have, cannot be used and is computed again; tokens, pages: how many",
    "evict": "pages kept for later went, of the tier before the colon, for no request in particular; pages: how many",
    "rollback": "a request was cut back to an earlier length; tokens: computed work taken back",
    "release": "pages behind a window went back; pages: how many",
    "draft": "a request was given slots for drafted tokens; tokens: how many",
    "accept": "a request's drafts were verified; tokens: how many of them were right",
    "token": "a request got a token; tokens: its id",
    "finish": "a request ended; tokens: its length, pages: given back",
}


class Event(NamedTuple):
    """One decision. What `tokens` and `pages` count depends on the kind: see `KINDS`."""

    step: int
    now: float
    kind: str
    request_id: str
    reason: str = ""
    tokens: int = 0
    pages: int = 0


class EventLog:
    """The last `capacity` events, and sinks that hear every one.

    Events of the kinds in `only_counted` are neither kept nor told: where nobody asks for every token, most need not be.

    Attributes:
        total: events ever emitted.
        counts: events ever emitted, by kind.

    Raises:
        ValueError: no capacity, or a kind that there is not.
    """

    def __init__(self, capacity: int = 4096, only_counted: Collection[str] = ()) -> None:
        if capacity <= 0:
            raise ValueError(f"capacity {capacity}: must be positive")
        if unknown := set(only_counted) - set(KINDS):
            raise ValueError(f"only_counted {min(unknown)!r}: must be one of {', '.join(KINDS)}")
        self.only_counted = frozenset(only_counted)
        self._ring: deque[Event] = deque(maxlen=capacity)
        self._sinks: list[Callable[[Event], None]] = []
        self.total = 0
        self.counts = dict.fromkeys(KINDS, 0)

    def emit(self, event: Event) -> None:
        """Appends `event`, the oldest one leaving when the ring is full, and tells every sink."""
        self.count(event.kind)
        if event.kind in self.only_counted:
            return
        self._ring.append(event)
        for sink in self._sinks:
            sink(event)

    def count(self, kind: str) -> None:
        """Counts an event of that kind, which is neither kept nor told."""
        self.total += 1
        self.counts[kind] += 1

    def subscribe(self, sink: Callable[[Event], None]) -> Callable[[], None]:
        """A function that ends the subscription of `sink`, which hears every event from now on."""
        self._sinks.append(sink)
        return lambda: self._sinks.remove(sink)

    def of(self, kind: str, request_id: str | None = None) -> list[Event]:
        """The events of a kind that are still in the ring, oldest first, of one request or of all."""
        return [e for e in self._ring if e.kind == kind and request_id in (None, e.request_id)]

    def __iter__(self) -> Iterator[Event]:
        return iter(self._ring)

    def __len__(self) -> int:
        return len(self._ring)
