"""What a request's prompt was spared: tokens found computed, in the pool or below it, when it was first admitted.

What a later admission finds is the request's own work from before a preemption, and no saving.
"""

from __future__ import annotations

from kvlab.schedule.events import Event

SOURCES = ("device", "host", "disk")
"""Where tokens are found: in the pool, in host memory, on disk."""


class SparedTokens:
    """Hears the events of requests and tells of each, once, what it was spared."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, int]] = {}
        self._admitted: set[str] = set()

    def hear(self, event: Event) -> dict[str, int] | None:
        """Tokens by source where `event` is a request's first admission; None for every other event."""
        name = event.request_id
        if event.kind in ("hit", "load"):
            if name not in self._admitted:
                source = "device" if event.kind == "hit" else event.reason.partition(":")[0]
                self._found.setdefault(name, {})[source] = event.tokens
        elif event.kind == "admit":
            if name not in self._admitted:
                self._admitted.add(name)
                return self._found.pop(name, {})
        elif event.kind == "finish":
            self._admitted.discard(name)
            self._found.pop(name, None)
        return None
