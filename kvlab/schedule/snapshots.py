"""What a scheduler and its cache look like at every step, as plain data: what a reader steps through, both ways.

Each step is seen twice: "taken", when pages are handed out and the forward is about to run, and "done", when its tokens
are certain. A snapshot is a copy, so going back to one is exact. Its fields:

    step, phase          which step, and "start", "taken", "done", or "end" for what came after the last step
    events               [kind, request id, sentence] of every event since the snapshot before
    chunks               [request id, first position, count, whether it samples, slots of group 0] of the step
    waiting, running     request ids in their order
    requests             id -> [tokens known, tokens computed, "waiting", "running" or the finish reason]
    tables               id -> the block table of each group, 0 where nothing is held
    free                 for each pool, its free units in the order in which they will be handed out
    cached, idle, prefix with a prefix cache: see `kvlab.schedule.snapshots_prefix`
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvlab.schedule.events import Event
from kvlab.schedule.request import Request
from kvlab.schedule.scheduler import Scheduler, Step
from kvlab.schedule.snapshots_prefix import prefix_picture

Snapshot = dict[str, Any]


class Recorder:
    """The snapshots of a scheduler, oldest first; `full` once there are `most` of them and no more are taken.

    Args:
        scheduler: whose steps; it is not changed here, see `recording`.
        most: snapshots kept.
    """

    def __init__(self, scheduler: Scheduler, most: int = 600) -> None:
        self.scheduler, self.most = scheduler, most
        self.snapshots: list[Snapshot] = []
        self.full = False
        self._events: list[Event] = []
        self._seen: dict[str, Request] = {}
        self.stop = scheduler.events.subscribe(self._events.append)
        self.take("start", None)

    @property
    def untold(self) -> int:
        """Events that no snapshot has yet: a refusal or an abort after the last step."""
        return len(self._events)

    def take(self, phase: str, step: Step | None) -> None:
        """Adds a snapshot of now, unless the record is full."""
        if len(self.snapshots) >= self.most:
            self.full = True
            return
        scheduler, cache, chunks = self.scheduler, self.scheduler.cache, step.chunks if step else ()
        for request in (*scheduler.running, *scheduler.waiting, *(c.request for c in chunks)):
            self._seen[request.request_id] = request
        running = [r.request_id for r in scheduler.running]
        self.snapshots.append({
            "step": scheduler.step_number,
            "phase": phase,
            "events": [[e.kind, e.request_id, sentence(e)] for e in self._events],
            "chunks": [_chunk(cache, c, phase) for c in chunks],
            "waiting": [r.request_id for r in scheduler.waiting],
            "running": running,
            "requests": {name: [len(r.tokens), r.num_computed, r.finish_reason or _state(name, running)]
                         for name, r in self._seen.items()},
            "tables": {name: [list(table) for table in tables] for name, tables in cache.tables.items()},
            "free": [list(pool.free_blocks()) for pool in cache.unit_pools],
            **prefix_picture(cache),
        })  # fmt: skip
        self._events.clear()


def _state(name: str, running: list[str]) -> str:
    return "running" if name in running else "waiting"


def _chunk(cache: Any, chunk: Any, phase: str) -> list[Any]:
    name, end = chunk.request.request_id, chunk.start + chunk.count
    slots = cache.slot_mapping(name, chunk.start, end) if phase == "taken" else []
    return [name, chunk.start, chunk.count, chunk.samples, slots]


@contextmanager
def recording(scheduler: Scheduler, most: int = 600) -> Iterator[Recorder]:
    """A recorder that sees every step of `scheduler`, an engine's too, while the block runs.

    The scheduler's `schedule` and `update` are wrapped for that time; what they do and return is unchanged.
    """
    recorder = Recorder(scheduler, most)
    schedule, update = scheduler.schedule, scheduler.update

    def seen_schedule(*args: Any, **kwargs: Any) -> Step:
        step = schedule(*args, **kwargs)
        recorder.take("taken", step)
        return step

    def seen_update(step: Step, *args: Any, **kwargs: Any) -> list:
        outputs = update(step, *args, **kwargs)
        recorder.take("done", step)
        return outputs

    scheduler.schedule, scheduler.update = seen_schedule, seen_update  # type: ignore[method-assign]
    try:
        yield recorder
    finally:
        del scheduler.schedule, scheduler.update  # the class's own are there again
        if recorder.untold:
            recorder.take("end", None)
        recorder.stop()


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _is(event: Event) -> str:
    return "is" if event.tokens + event.pages <= 1 else "are"


def sentence(event: Event) -> str:
    """The event for people."""
    name, tokens, pages = event.request_id, _many(event.tokens, "token"), _many(event.pages, "page")
    why = f": {event.reason}" if event.reason else ""
    counts = ", ".join(said for number, said in ((event.tokens, tokens), (event.pages, pages)) if number)
    return {
        "arrive": f"{name} arrives with {tokens}{why}.",
        "refuse": f"{name} is refused{why}.",
        "wait": f"{name} waits{why}.",
        "admit": f"{name} is admitted{why}; {tokens} to compute.",
        "hit": f"{name} finds {tokens} in the cache{why}.",
        "chunk": f"{name} computes {tokens}" + (f"; {event.reason}." if event.reason else "."),
        "preempt": f"{name} loses {pages}{why}; {tokens} computed for nothing.",
        "swap_out": f"{name} leaves {pages} to the tier below{why}.",
        "swap_in": f"{name} gets {pages} back from below{why}.",
        "rollback": f"{name} is cut back by {tokens}{why}.",
        "expel": f"{pages} below the pool that {name} could have read are found no more{why}.",
        "evict": f"A cache gives up {pages}{why}.",
        "lost": f"{name + ': ' if name else ''}{counts or 'something'} of lower tiers {_is(event)} lost{why}.",
        "release": f"{name} gives back {pages}{why}.",
        "token": f"{name} gets token {event.tokens}.",
        "finish": f"{name} ends with {tokens}{why}; {pages} given back.",
    }.get(event.kind, f"{name}: {event.kind}{why}{f' ({counts})' if counts else ''}.")
