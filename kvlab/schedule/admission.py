"""Who is admitted: a waiting request when all of its known tokens fit, with what the caches already have of it."""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING, Any

from kvlab.schedule.request import Request

if TYPE_CHECKING:
    from kvlab.schedule.scheduler import Scheduler


class Admission:
    """Moves requests from waiting to running, for one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._last_wait = ("", "")

    def next(self, now: float) -> Request | None:
        """The next request, running from now on, its pages of earlier tokens in place; None when it has to wait."""
        scheduler = self.scheduler
        request = scheduler.waiting.head(lambda r: self._tokens(self._hit(r)))
        hit = self._hit(request)
        reason = self._refusal(request, hit)
        if reason:
            if self._last_wait != (request.request_id, reason):
                self._last_wait = (request.request_id, reason)
                scheduler.emit(now, "wait", request, reason)
            return None
        scheduler.waiting.take(request)
        insort(scheduler.running, request, key=scheduler.policy.rank)
        self._bring_back(now, request, hit)
        scheduler.emit(now, "admit", request, tokens=request.num_missing)
        return request

    def _refusal(self, request: Request, hit: Any) -> str:
        scheduler = self.scheduler
        running, alone = len(scheduler.running), scheduler.pressure.alone
        if alone and request is not alone:
            return f"request {alone.request_id} needs the pool to itself"
        if running >= scheduler.limits.max_num_seqs:
            return f"max_num_seqs {scheduler.limits.max_num_seqs} requests run"
        known = {"hit": hit} if hit else {}
        if not scheduler.cache.has_room(len(request.tokens), spare=running, **known):
            return f"{len(request.tokens)} tokens and a page for each running request do not fit now"
        return ""

    def _bring_back(self, now: float, request: Request, hit: Any) -> None:
        """Gives the request the pages of tokens that are computed already, and counts these as computed."""
        scheduler, tiers, name = self.scheduler, self.scheduler.tiers, request.request_id
        if tiers and tiers.parked(name):
            pages, num_bytes = tiers.unpark(name)
            scheduler.emit(now, "swap_in", request, f"{num_bytes} bytes", request.num_computed, pages)
            return
        if hit:
            taken = scheduler.cache.allocate(name, hit.tokens, hit=hit)
            assert taken, f"{request} was admitted without room for its hit"
            request.num_computed = hit.tokens
            scheduler.emit(now, "hit", request, "in the pool", hit.tokens)

    def _hit(self, request: Request) -> Any:
        """What the prefix cache has of the request; None without a prefix cache, and for one that was swapped out."""
        scheduler = self.scheduler
        match = getattr(scheduler.cache, "match", None)
        if match is None or (scheduler.tiers and scheduler.tiers.parked(request.request_id)):
            return None
        return match(request)

    @staticmethod
    def _tokens(hit: Any) -> int:
        return hit.tokens if hit else 0
