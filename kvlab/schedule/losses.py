"""What goes from caches and tiers, as events: pages evicted, expired or taken over, and files that could not be written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvlab.schedule.events import Event

if TYPE_CHECKING:
    from kvlab.schedule.scheduler import Scheduler

MOST_NAMED = 8


class Losses:
    """Hears the prefix cache and the tiers of one scheduler. What they give up belongs to no request.

    Nobody tells the time between steps: what goes then, as when a prefix cache is cleared, carries the last step's.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self._now = scheduler, 0.0
        self._prefix = getattr(scheduler.cache, "prefix", None)
        if self._prefix:
            self._prefix.on_evict = self._evicted
        if scheduler.tiers:
            scheduler.tiers.on_gone = self._gone

    def tick(self, now: float) -> None:
        """It is `now`: what nobody used for too long goes, and copies under way are looked after."""
        self._now = now
        self.scheduler.cache.tick(now)
        if self.scheduler.tiers:
            self.scheduler.tiers.poll()

    def _evicted(self, items: Sequence[int], reason: str) -> None:
        """Tells of pages that went at once, in one event. Where evictions are only counted, that is one too, however many
        pages: the prefix cache's own counters have those."""
        if "evict" in self.scheduler.events.only_counted:
            # a simulation drops a million pages, and nobody asks which
            self.scheduler.events.count("evict")
            return
        named: dict[str, list[str]] = {}
        groups, alone = self.scheduler.cache.groups, len(self.scheduler.cache.unit_pools) == 1
        for group, page in self._prefix.named(items[:MOST_NAMED]):
            named.setdefault("" if alone else f"{groups[group].name} ", []).append(str(page))
        pages = "; ".join(f"{name}{', '.join(pages)}" for name, pages in named.items())
        more = ", ..." if len(items) > MOST_NAMED else ""
        self._gone("evict", f"pool: {reason}; {pages}{more}", len(items))

    def _gone(self, kind: str, reason: str, pages: int) -> None:
        self.scheduler.events.emit(Event(self.scheduler.step_number, self._now, kind, "", reason, 0, pages))
