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
        request = scheduler.pressure.alone
        if request not in scheduler.waiting:
            request = scheduler.waiting.head(lambda r: self._tokens(self._hit(r)))
        hit = self._hit(request)
        reason = self._refusal(request, hit)
        if reason:
            if self._last_wait != (request.request_id, reason):
                self._last_wait = (request.request_id, reason)
                scheduler.emit(now, "wait", request, reason)
            return None
        first = f"first of {len(scheduler.waiting)} by {scheduler.policy.order}"
        why = f"{'alone' if scheduler.pressure.alone else first}, room beside {len(scheduler.running)}"
        scheduler.waiting.take(request)
        insort(scheduler.running, request, key=scheduler.policy.rank)
        self._bring_back(now, request, hit)
        scheduler.emit(now, "admit", request, why, request.num_missing)
        return request

    def _refusal(self, request: Request, hit: Any) -> str:
        scheduler = self.scheduler
        running, alone = len(scheduler.running), scheduler.pressure.alone
        if alone and request is not alone:
            return f"request {alone.request_id} needs the pool to itself"
        if running >= scheduler.limits.max_num_seqs:
            return f"max_num_seqs {scheduler.limits.max_num_seqs} requests run"
        if scheduler.tiers and scheduler.tiers.leaving(request.request_id):
            return "its pages are still being read on their way down"
        known = {"hit": hit} if hit else {}
        if not scheduler.cache.has_room(len(request.tokens), spare=running, **known):
            if scheduler.tiers:
                scheduler.tiers.lookups.rest(request.request_id)
            return f"{len(request.tokens)} tokens and a page for each running request do not fit now"
        tiers = scheduler.tiers
        if tiers and not tiers.parked(request.request_id) and tiers.lookups.start(request, self._tokens(hit)):
            return "its saved pages are being read from disk"
        return ""

    def _bring_back(self, now: float, request: Request, hit: Any) -> None:
        """Gives the request the pages of tokens that are computed already, and counts these as computed."""
        scheduler, tiers, name = self.scheduler, self.scheduler.tiers, request.request_id
        if tiers and tiers.parked(name):
            pages, num_bytes = tiers.unpark(name)
            if not tiers.lossy:
                # what went through fewer bits is nobody else's prefix
                scheduler.cache.stand(request)
            scheduler.emit(now, "swap_in", request, f"{num_bytes} bytes", request.num_computed, pages)
            return
        if tiers and self._load(now, request, hit):
            return
        if hit:
            taken = scheduler.cache.allocate(name, hit.tokens, hit=hit)
            assert taken, f"{request} was admitted without room for its hit"
            request.num_computed = hit.tokens
            if hit.tokens:
                scheduler.emit(now, "hit", request, "in the pool", hit.tokens)

    def _load(self, now: float, request: Request, hit: Any) -> bool:
        """Whether a lower tier has more of the request than the pool, and that is on its way."""
        scheduler, tiers = self.scheduler, self.scheduler.tiers
        found = tiers.find(request, self._tokens(hit))
        while tiers.lookups.lost:
            reason, pages = tiers.lookups.lost.pop()
            scheduler.emit(now, "lost", request, reason, pages=pages)
        # the request is counted among the running ones by now
        known = {"hit": hit} if found and found.start else {}
        if found and not scheduler.cache.has_room(len(request.tokens), spare=len(scheduler.running) - 1, **known):
            tiers.release(found)
            return False
        if found:
            tiers.load(request.request_id, found, hit)
            if found.start:
                scheduler.emit(now, "hit", request, "in the pool", found.start)
            else:
                scheduler.cache.stand(request)
            request.num_computed = found.tokens
            for source, (tokens, entries) in found.sources.items():
                reason = f"{source}: {tiers.bytes_in(entries)} bytes"
                scheduler.emit(now, "load", request, reason, tokens, len(entries))
        return found is not None

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
