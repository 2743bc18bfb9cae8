"""Runs of steps in which every running request decodes and nobody comes or goes: the same result with less work.

The scheduler would decide the same in each of them: it is not asked again until a request ends, pages run out, or one
arrives that could be admitted. Pages are taken from the real cache manager, where a request needs one. What a run leaves
behind is what the steps one by one leave, but for the events of tokens and chunks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from kvlab.schedule import Request, Scheduler, Step
from kvlab.simulate.clock import StepClock

SIMPLE = ("all", "window", "chunk")


class DecodeRuns:
    """Finds and takes such runs.

    Args:
        scheduler: its requests are computed without drafts.
        clock: seconds of a step.
        token_of: the token that a request generates.

    Attributes:
        peak_kv_bytes: the most that requests held in a step of any run.
    """

    def __init__(self, scheduler: Scheduler, clock: StepClock, token_of: Callable[[str], int]) -> None:
        self._scheduler, self._cache, self._clock, self._token_of = scheduler, scheduler.cache, clock, token_of
        groups = scheduler.cache.groups
        # states and compressed entries have pages by rules of their own: there every step is scheduled
        self.possible = all(g.retention.rule in SIMPLE for g in groups) and scheduler.policy.order == "fcfs"
        self._sizes = sorted({g.block_size for g in groups})
        self._windows = any(g.retention.rule != "all" for g in groups)
        self._changes = self._seen()
        self._running: list[Request] = []
        self.peak_kv_bytes = 0

    def may_follow(self, step: Step, ended: int) -> bool:
        """Whether the steps after `step`, in which `ended` requests ended, are like it."""
        changes, self._changes = self._changes, self._seen()
        scheduler = self._scheduler
        return (
            self.possible
            and not ended
            and changes == self._changes
            and 0 < len(step.chunks) == len(scheduler.running)
            and step.num_decodes == len(step.chunks)
        )

    def take(self, now: float, next_arrival: float) -> list[float]:
        """The times at which the steps of a run end; every running request got a token at each of them.

        It ends before a step in which a request would end or pages are short, with the step in which the next request
        arrives where that one could be admitted, and with one that gives pages back while somebody waits.
        """
        scheduler = self._scheduler
        self._running = running = sorted(scheduler.running, key=scheduler.policy.rank)
        lengths = [r.num_computed for r in running]
        most = min(r.max_total - len(r.tokens) for r in running) - 1
        times: list[float] = []
        while len(times) < most and now < next_arrival:
            if not self._take_pages(lengths):
                break
            self.peak_kv_bytes = max(self.peak_kv_bytes, self._cache.held_bytes)
            lengths = [n + 1 for n in lengths]
            now += self._clock.decode_seconds(lengths)
            times.append(now)
            if self._certain(lengths) and not self.open_queue:
                # pages behind windows went back: somebody who waits may come in now
                break
        if times:
            for request, n in zip(running, lengths, strict=True):
                self._grow(request, n + 1)
                request.num_computed = n
            scheduler.step_number += len(times)
        return times

    @property
    def open_queue(self) -> bool:
        """Whether a request that arrives now could run in the next step."""
        scheduler = self._scheduler
        return not scheduler.waiting and len(scheduler.running) < scheduler.limits.max_num_seqs

    def _take_pages(self, lengths: list[int]) -> bool:
        """Whether every request has a slot for one more token now. Asked for in the scheduler's order, so that what was
        taken before one gets none is what the scheduler would have taken."""
        return all(
            self._cache.allocate(request.request_id, n + 1)
            for request, n in zip(self._running, lengths, strict=True)
            if any(not n % size for size in self._sizes)
        )

    def _certain(self, lengths: list[int]) -> int:
        """Pages given back now that the running requests have `lengths` tokens."""
        given_back = 0
        for request, n in zip(self._running, lengths, strict=True):
            if self._windows or any(not n % size for size in self._sizes):
                # pages are cached by the tokens in them
                self._grow(request, n)
                given_back += self._cache.advance(request.request_id, n)
        return given_back

    def _grow(self, request: Request, length: int) -> None:
        token = self._token_of(request.request_id)
        request.tokens.extend(array("i", [token]) * (length - len(request.tokens)))

    def _seen(self) -> tuple[int, ...]:
        counts = self._scheduler.events.counts
        return tuple(counts.get(kind, 0) for kind in ("admit", "preempt", "arrive", "release"))
