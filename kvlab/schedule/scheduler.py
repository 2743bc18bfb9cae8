"""The scheduler: each step has a budget of tokens, and hands it out. There are no phases.

A request is behind by `num_missing` tokens: one when it decodes, its whole prompt when it is new, everything after a
preemption. Running requests are served first, in the order of their rank, then waiting ones in the order of the policy
(`kvlab.schedule.policy`). When pages run out a victim gives way and goes on later (`kvlab.schedule.pressure`). The
senior, first in rank, is never a victim while another can be, is served first, and fits an empty pool (or it was
refused), so it finishes: nothing waits for ever.

Source: vLLM v1/core/sched/scheduler.py; it differs by an admission rule that wants all of a request's known tokens to
fit and a page to spare for each running request.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvlab.cache import KVCacheManager, Restart
from kvlab.schedule.admission import Admission
from kvlab.schedule.events import Event, EventLog
from kvlab.schedule.losses import Losses
from kvlab.schedule.policy import FIRST_COME, SchedulingPolicy
from kvlab.schedule.pressure import Pressure
from kvlab.schedule.request import Request
from kvlab.schedule.step import Chunk, Limits, Output, Step, Verified
from kvlab.schedule.waiting import WaitingQueue

__all__ = ["Chunk", "Limits", "Output", "Scheduler", "Step", "Verified"]


class Scheduler:
    """Requests waiting and running, over the cache manager's pages. Its methods take the time as an argument.

    Args:
        cache: the block tables. limits: of steps and sequences.
        policy: who goes first, who gives way. tiers: what lies below the pool (see `kvlab.cache.tiers`), None: nothing.
    """

    def __init__(
        self, cache: KVCacheManager, limits: Limits, events: EventLog | None = None,
        policy: SchedulingPolicy = FIRST_COME, tiers=None,
    ) -> None:  # fmt: skip
        self.cache, self.limits, self.policy, self.tiers = cache, limits, policy, tiers
        # an empty log is false: only None means none
        self.events = EventLog() if events is None else events
        self.waiting = WaitingQueue(policy)
        self.running: list[Request] = []
        self.step_number = 0
        self.pressure, self.admission, self.losses = Pressure(self), Admission(self), Losses(self)
        self._arrived = 0
        # requests whose tokens are being computed: their states are ahead of what is known
        self._under_way: frozenset[str] = frozenset()

    @property
    def has_work(self) -> bool:
        """Whether any request is alive."""
        return bool(self.waiting or self.running)

    def add(self, request: Request, now: float) -> None:
        """Lets the request wait.

        Raises:
            ValueError: it can never run; the event log has the reason too, and no other request notices.
        """
        request.max_total = min(request.max_total, self.limits.max_model_len)
        self._arrived += 1
        request.number = self._arrived
        if reason := self.refusal(request.num_prompt, request.max_total):
            request.finish_reason, request.error = "error", reason
            self.emit(now, "refuse", request, reason)
            raise ValueError(reason)
        self.waiting.push(request)
        self.emit(now, "arrive", request, f"the pool can hold all {request.max_total} tokens", request.num_prompt)

    def refusal(self, num_prompt: int, max_total: int) -> str:
        """Why a request of so many prompt tokens and so many in all can never run; "" when it can."""
        limit = self.limits.max_model_len
        if not num_prompt:
            return "prompt: must hold at least one token"
        if num_prompt >= limit:
            return f"prompt of {num_prompt} tokens: must leave room for one more within max_model_len {limit}"
        # the last token of a request is never put into the cache
        why = self.cache.too_long(max_total - 1)
        return f"request can never fit: {why}" if why else ""

    def schedule(self, now: float) -> Step:
        """The next step. Takes pages for it, after taking them from others if need be.

        Its chunks are empty only when every request waits for copies that are under way (`tiers.wait`).
        """
        self.step_number += 1
        self.losses.tick(now)
        chunks, budget, preempted = self._serve_running(now)
        # a victim of this step would come right back and be thrown out again, unless nobody runs any more
        while budget and self.waiting and not (preempted and self.running):
            request = self.admission.next(now)
            if request is None:
                break
            if self.is_loading(request):
                continue
            count, keeps = self._count(request, budget)
            taken = self.cache.allocate(request.request_id, request.num_computed + count, keeps)
            assert taken, f"{request} was admitted without room for its first chunk"
            chunks.append(self._chunk(request, count, keeps))
            budget -= count
        for chunk in chunks:
            left = chunk.request.num_missing - chunk.count
            self.emit(now, "chunk", chunk.request, f"{left} tokens left" if left else "", chunk.count)
        # drafts cost no request its own tokens or pages: they come last
        for i, chunk in enumerate(chunks):
            if chunk.request.drafts and chunk.samples and not chunk.keeps_state:
                chunks[i] = self._with_drafts(now, chunk, budget)
                budget -= len(chunks[i].drafts)
        chunks.sort(key=lambda chunk: chunk.count != 1)
        assert chunks or not self.has_work or self.copies_under_way, "requests are alive, none was given a token"
        self._under_way = frozenset(chunk.request.request_id for chunk in chunks)
        return Step(self.step_number, tuple(chunks))

    def update(
        self, step: Step, sampled: Sequence[int | Verified | None], now: float, spoiled: Collection[str] = ()
    ) -> list[Output]:  # fmt: skip
        """What the requests of `step` got.

        `sampled` holds, for each chunk that samples, a token, or None when its logits are not finite; for a chunk with
        drafts what was verified of it. `spoiled` are requests with other rows that are not finite.
        What belongs to a request that ended or was preempted since then is dropped.
        """
        self._under_way = frozenset()
        outputs = []
        tokens = iter(sampled)
        for chunk in step.chunks:
            token = next(tokens) if chunk.samples else None
            request = chunk.request
            if request.finish_reason or request.preemptions != chunk.epoch:
                continue
            # without drafts every token is certain
            verified = token if isinstance(token, Verified) else Verified((token,), chunk.start + chunk.count)
            if chunk.drafts:
                self.emit(now, "accept", request, f"of {len(chunk.drafts)}", len(verified.tokens) - 1)
            for token in verified.tokens:
                if (token is None and chunk.samples) or request.request_id in spoiled:
                    # what this step wrote is never offered to others
                    outputs.append(self._fail(request, now))
                    break
                # drafts become known one by one, and only what is known and computed is certain
                request.num_computed = min(verified.computed, len(request.tokens))
                if chunk.keeps_state:
                    self.pressure.save(request, now)
                if pages := self.cache.advance(request.request_id, request.num_computed):
                    self.emit(now, "release", request, "behind every window", pages=pages)
                if chunk.samples:
                    outputs.append(self._take(request, token, now))
                if request.finish_reason:
                    break
        return outputs

    def abort(self, request_id: str, now: float) -> bool:
        """Whether a live request of that id was ended."""
        return self._end(request_id, "abort", now, "asked for")

    def stop(self, request_id: str, now: float, reason: str) -> bool:
        """Whether a live request of that id was ended as complete: its caller has read all that it wants."""
        return self._end(request_id, "stop", now, reason)

    def preempt(self, request_id: str, now: float, reason: str = "asked for") -> bool:
        """Whether a running request of that id lost its pages and waits again, as under pressure."""
        request = self.find(request_id)
        if request is None or request not in self.running or self.is_loading(request):
            return False
        self.pressure.preempt(now, request, reason, may_swap=request_id not in self._under_way)
        return True

    def truncate(self, request_id: str, tokens: int, now: float) -> Restart:
        """Where the request goes on after only its first `tokens` tokens were kept; the rest is picked anew.

        Raises:
            ValueError: no live request of that id, a length outside its output, or a cache that cannot step back
                that far (see `KVCacheManager.truncate`). Nothing has changed then.
        """
        request = self.find(request_id)
        if request is None:
            raise ValueError(f"request {request_id}: must be alive")
        if not request.num_prompt <= tokens <= len(request.tokens):
            raise ValueError(
                f"tokens {tokens}: must be from the prompt's {request.num_prompt} to the {len(request.tokens)} there are"
            )
        # what lies in a lower tier is not cut: it is computed again
        self.pressure.forget_parked(request, now)
        # the last token that stays is known but not in the cache
        before, length = request.num_computed, min(request.num_computed, tokens - 1)
        restart = self.cache.truncate(request_id, length) if before else Restart(0)
        del request.tokens[tokens:]
        request.num_computed = restart.computed
        self.emit(now, "rollback", request, f"{tokens} tokens stay", before - restart.computed)
        return restart

    def find(self, request_id: str) -> Request | None:
        """The live request of that id."""
        return next((r for r in (*self.running, *self.waiting) if r.request_id == request_id), None)

    def is_loading(self, request: Request) -> bool:
        """Whether the request's pages are still being written by a copy."""
        return bool(self.tiers) and self.tiers.loading(request.request_id)

    @property
    def copies_under_way(self) -> bool:
        """Whether pages or requests wait for a copy to end."""
        return bool(self.tiers) and self.tiers.in_flight

    def emit(self, now: float, kind: str, request: Request, reason: str = "", tokens: int = 0, pages: int = 0) -> None:
        """Logs a decision."""
        events = self.events
        if kind in events.only_counted:
            events.count(kind)
        else:
            events.emit(Event(self.step_number, now, kind, request.request_id, reason, tokens, pages))

    def _serve_running(self, now: float) -> tuple[list[Chunk], int, bool]:
        """Chunks of running requests, the budget left, and whether any of them lost its pages."""
        budget = self.limits.max_batched_tokens
        chunks: dict[str, Chunk] = {}
        lost: list[Request] = []
        for request in list(self.running):
            if not budget:
                break
            if (lost and request in lost) or (self.tiers and self.is_loading(request)):
                continue
            count, keeps = self._count(request, budget)
            while not (taken := self.cache.allocate(request.request_id, request.num_computed + count, keeps)):
                victim = self.pressure.relieve(now, request)
                if victim is None:
                    break
                lost.append(victim)
                if victim.request_id in chunks:
                    budget += chunks.pop(victim.request_id).count
                if victim is request:
                    break
            if taken:
                chunks[request.request_id] = self._chunk(request, count, keeps)
                budget -= count
        return list(chunks.values()), budget, bool(lost)

    def _fail(self, request: Request, now: float) -> Output:
        request.error = "logits are not finite"
        self._finish(request, "error", now, request.error)
        return Output(request.request_id, None, "error")

    def _take(self, request: Request, token: int, now: float) -> Output:
        request.tokens.append(token)
        self.emit(now, "token", request, tokens=token)
        reason = request.ends_with(token)
        if reason:
            why = f"token {token}" if reason == "stop" else f"{len(request.tokens)} tokens"
            self._finish(request, reason, now, why)
        return Output(request.request_id, token, reason)

    def _count(self, request: Request, budget: int) -> tuple[int, bool]:
        """Tokens of the request's next chunk, and whether its state is kept after them: a chunk ends where it is."""
        missing = len(request.tokens) - request.num_computed
        count = missing if missing < budget else budget
        if not self.cache.stops:
            return count, False
        keep = self.cache.next_state(request.request_id, request.num_computed, request.num_prompt)
        if keep is None or keep > request.num_computed + count:
            return count, False
        return keep - request.num_computed, True

    def _chunk(self, request: Request, count: int, keeps_state: bool) -> Chunk:
        start = request.num_computed
        samples = start + count == len(request.tokens)
        return Chunk(request, start, count, samples, keeps_state, (), request.preemptions)

    def _with_drafts(self, now: float, chunk: Chunk, room: int) -> Chunk:
        """`chunk` with the request's drafts that fit the step's room, the request's length and the free pages."""
        request, known = chunk.request, len(chunk.request.tokens)
        # one more token is picked behind the last draft
        room = min(room, request.max_total - 1 - known)
        stops = self.cache.stops
        keep = self.cache.next_state(request.request_id, known, request.num_prompt) if stops else None
        if keep is not None:
            # what is to be kept must have seen no draft
            room = min(room, keep - 1 - known)
        drafts = request.drafts[: max(0, room)]
        if not drafts or not self.cache.drafts.allocate(request.request_id, known, len(drafts)):
            return chunk
        self.emit(now, "draft", request, tokens=len(drafts))
        return chunk._replace(count=chunk.count + len(drafts), drafts=drafts)

    def _end(self, request_id: str, finish_reason: str, now: float, reason: str) -> bool:
        request = self.find(request_id)
        if request is not None:
            self._finish(request, finish_reason, now, reason)
        return request is not None

    def _finish(self, request: Request, finish_reason: str, now: float, reason: str) -> None:
        request.finish_reason = finish_reason
        (self.running if request in self.running else self.waiting).remove(request)
        pages = self.pressure.give_back(request, now)
        self.cache.forget(request.request_id)
        self.emit(now, "finish", request, f"{finish_reason}: {reason}", len(request.tokens), pages)
