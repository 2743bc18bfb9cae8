"""What happens when pages run out: who gives way, and whether its pages are dropped or moved to the tier below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlab.schedule.request import Request

if TYPE_CHECKING:
    from kvlab.schedule.scheduler import Scheduler


class Pressure:
    """Takes pages from running requests, for one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        # the last victim that had no one beside it: its own pages were scattered over too many sectors, which cannot
        # happen again while it runs alone
        self._alone: Request | None = None

    @property
    def alone(self) -> Request | None:
        """A live request that may have no other beside it."""
        return self._alone if self._alone and not self._alone.finish_reason else None

    def relieve(self, now: float, asking: Request) -> Request | None:
        """The running request that lost its pages because `asking` needs some; None when `asking` is to wait a step.

        It waits when pages are on their way: held only by copies that still read them. Taking more victims meanwhile
        would throw everybody out one by one.
        """
        scheduler = self.scheduler
        if scheduler.tiers and scheduler.tiers.pages_coming:
            scheduler.emit(now, "wait", asking, "pages come free when copies that read them end")
            return None
        senior, idle = scheduler.running[0], [r for r in scheduler.running if not scheduler.is_loading(r)]
        candidates = [r for r in idle if r is not senior]
        if candidates:
            victim, why = scheduler.policy.choose(candidates)
        elif scheduler.running == [asking]:
            self._alone, victim, why = asking, asking, ""
        else:
            scheduler.emit(now, "wait", asking, "all others are being loaded")
            return None
        self.preempt(now, victim, f"{asking.request_id} needs pages" + (f"; {why}" if why else ""))
        return victim

    def preempt(self, now: float, victim: Request, reason: str, may_swap: bool = True) -> None:
        """`victim` loses its pages and waits again; it computes its tokens again, or has them brought back."""
        scheduler = self.scheduler
        scheduler.running.remove(victim)
        victim.preemptions += 1
        victim.drafts = ()
        swaps, why = self._swaps(victim) if may_swap else (False, "")
        if swaps:
            pages, num_bytes = scheduler.tiers.park(victim.request_id)
            scheduler.emit(now, "preempt", victim, reason, 0, pages)
            lossy = scheduler.tiers.lossy
            kind, how = ("compress", f" in {lossy}") if lossy else ("swap_out", "")
            scheduler.emit(now, kind, victim, f"{num_bytes} bytes{how}{why}", victim.num_computed, pages)
        else:
            pages = scheduler.cache.free(victim.request_id)
            scheduler.emit(now, "preempt", victim, reason + why, victim.num_computed, pages)
            victim.num_computed = 0
        scheduler.waiting.push(victim)

    def give_back(self, request: Request, now: float) -> int:
        """Pages given back by a request that ended; what a tier held of it is forgotten."""
        scheduler = self.scheduler
        if scheduler.tiers:
            if request.finish_reason in ("stop", "length") and request.request_id in scheduler.cache.tables:
                self.save(request, now)
            if request.finish_reason == "error" and (expelled := scheduler.tiers.expel(request)):
                scheduler.emit(now, "expel", request, request.error, pages=expelled)
            scheduler.tiers.forget(request.request_id)
        return scheduler.cache.free(request.request_id, distrust=request.finish_reason == "error")

    def save(self, request: Request, now: float) -> None:
        """Saves what the request holds for later ones: at its end, or at a length where others may go on from it."""
        tiers = self.scheduler.tiers
        if tiers:
            saved = tiers.save(request) if request.finish_reason else tiers.save_checkpoint(request)
            if saved:
                why = f"{saved[1]} bytes" + ("" if request.finish_reason else ", a checkpoint")
                self.scheduler.emit(now, "save", request, why, request.num_computed, saved[0])

    def forget_parked(self, request: Request, now: float) -> None:
        """What a lower tier holds of a waiting request is given up: its tokens are computed again."""
        tiers = self.scheduler.tiers
        if tiers:
            # what was looked up for its old tokens
            tiers.lookups.let_go(request.request_id)
        if tiers and tiers.loading(request.request_id):
            tiers.wait()
        if tiers and tiers.parked(request.request_id):
            tiers.forget(request.request_id)
            self.scheduler.emit(now, "lost", request, "cut back while it waited", request.num_computed)
            request.num_computed = 0

    def _swaps(self, victim: Request) -> tuple[bool, str]:
        """Whether the victim's pages move down rather than being dropped, and why."""
        policy, tiers = self.scheduler.policy, self.scheduler.tiers
        if policy.preempt == "recompute" or not victim.num_computed:
            return False, ""
        if tiers is None:
            return False, "; there is no tier below"
        num_bytes = tiers.bytes_of(victim.request_id)
        why = ""
        if policy.preempt == "auto":
            assert policy.costs is not None
            swap, again = policy.costs.swap_s(num_bytes), policy.costs.recompute_s(victim.num_computed)
            why = f"; swap {1e3 * swap:.3g} ms, recompute {1e3 * again:.3g} ms"
            if again <= swap:
                return False, why
        if not tiers.make_room(victim.request_id):
            return False, f"{why}; the tier below is full"
        return True, why
