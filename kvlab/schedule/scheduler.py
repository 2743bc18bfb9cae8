"""The scheduler: each step has a budget of tokens, and hands it out. There are no phases.

A request is behind by `num_missing` tokens: one when it decodes, its whole prompt when it is new, everything after a
preemption. Running requests are served first, in the order of their arrival, then waiting ones. When pages run out,
the request that arrived last loses its own and starts again later; the oldest is never taken from, and it fits an
empty pool (or it was refused), so it finishes: nothing waits for ever.

Source: vLLM v1/core/sched/scheduler.py; it differs by an admission rule that wants all of a request's known tokens to
fit and a page to spare for each running request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvlab.cache import KVCacheManager, Restart
from kvlab.schedule.events import Event, EventLog
from kvlab.schedule.request import Request


@dataclass(frozen=True)
class Limits:
    """What one step and one sequence may take.

    Attributes:
        max_num_seqs: requests that run at once.
        max_batched_tokens: tokens of one step over all requests.
        max_model_len: prompt and output of one request.
    """

    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1")


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of a request from position `start` on, the last ones of them `drafts`.

    `samples`: its last row picks the next token, and so does the row before each draft. `keeps_state`: a copy of the
    state after it is to be kept.
    """

    request: Request
    start: int
    count: int
    samples: bool
    keeps_state: bool = False
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward computes: chunks of exactly one token first, then the longer ones."""

    number: int
    chunks: tuple[Chunk, ...]

    @property
    def num_decodes(self) -> int:
        """How many chunks, the first ones, have exactly one token."""
        return sum(chunk.count == 1 for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        """Tokens over all chunks."""
        return sum(chunk.count for chunk in self.chunks)

    @property
    def sampling(self) -> list[Chunk]:
        """The chunks whose request gets a token, in the order of the batch."""
        return [chunk for chunk in self.chunks if chunk.samples]


@dataclass(frozen=True, slots=True)
class Verified:
    """What a chunk with drafts came to: the drafts that were right and the token picked after them (None: its logits
    were not finite), and how many tokens of the request now count as computed."""

    tokens: tuple[int | None, ...]
    computed: int


@dataclass(frozen=True, slots=True)
class Output:
    """A request's new token (None when it ended without one) and, at its end, the finish reason."""

    request_id: str
    token_id: int | None
    finish_reason: str | None = None


class Scheduler:
    """Requests waiting and running, over the cache manager's pages. Its methods take the time as an argument."""

    def __init__(self, cache: KVCacheManager, limits: Limits, events: EventLog | None = None) -> None:
        self.cache = cache
        self.limits = limits
        # an empty log is false: only None means none
        self.events = EventLog() if events is None else events
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.step_number = 0
        self._last_wait = ("", "")
        # the last victim that had no one beside it: its own pages were scattered over too many sectors, which cannot
        # happen again while it runs alone
        self._alone: Request | None = None

    @property
    def has_work(self) -> bool:
        """Whether any request is alive."""
        return bool(self.waiting or self.running)

    def add(self, request: Request, now: float) -> None:
        """Lets the request wait.

        Raises:
            ValueError: it can never run; the event log has the reason too, and no other request notices.
        """
        limit = self.limits.max_model_len
        request.max_total = min(request.max_total, limit)
        reason = ""
        if not request.num_prompt:
            reason = "prompt: must hold at least one token"
        elif request.num_prompt >= limit:
            reason = f"prompt of {request.num_prompt} tokens: must leave room for one more within max_model_len {limit}"
        # the last token of a request is never put into the cache
        elif why := self.cache.too_long(request.max_total - 1):
            reason = f"request can never fit: {why}"
        if reason:
            request.finish_reason, request.error = "error", reason
            self._emit(now, "refuse", request, reason)
            raise ValueError(reason)
        self.waiting.append(request)
        self._emit(now, "arrive", request, tokens=request.num_prompt)

    def schedule(self, now: float) -> Step:
        """The next step. Takes pages for it, after taking them from the last arrived if need be."""
        self.step_number += 1
        budget = self.limits.max_batched_tokens
        chunks: list[Chunk] = []
        preempted = False
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            count, keeps = self._count(request, budget)
            while not self.cache.allocate(request.request_id, request.num_computed + count, keeps):
                preempted = True
                if self._preempt(now, request) is request:
                    break
            else:
                chunks.append(self._chunk(now, request, count, keeps))
                budget -= count
                index += 1
        # a victim of this step would come right back and be thrown out again, unless nobody runs any more
        while budget and self.waiting and not (preempted and self.running) and self._may_admit(now):
            request = self.waiting.popleft()
            self.running.append(request)
            count, keeps = self._count(request, budget)
            taken = self.cache.allocate(request.request_id, count, keeps)
            assert taken, f"{request} was admitted without room for its first chunk"
            self._emit(now, "admit", request, tokens=request.num_missing)
            chunks.append(self._chunk(now, request, count, keeps))
            budget -= count
        # drafts cost no request its own tokens or pages: they come last
        for i, chunk in enumerate(chunks):
            if chunk.request.drafts and chunk.samples and not chunk.keeps_state:
                chunks[i] = self._with_drafts(now, chunk, budget)
                budget -= len(chunks[i].drafts)
        chunks.sort(key=lambda chunk: chunk.count != 1)
        assert chunks or not self.has_work, "requests are alive, none was given a token"
        return Step(self.step_number, tuple(chunks))

    def update(self, step: Step, sampled: Sequence[int | Verified | None], now: float) -> list[Output]:
        """What the requests of `step` got.

        `sampled` holds, for each chunk that samples, a token, or None when its logits are not finite; for a chunk with
        drafts what was verified of it.
        """
        outputs = []
        tokens = iter(sampled)
        for chunk in step.chunks:
            token = next(tokens) if chunk.samples else None
            request = chunk.request
            if request.finish_reason:
                continue
            # without drafts every token is certain
            verified = token if isinstance(token, Verified) else Verified((token,), chunk.start + chunk.count)
            if chunk.drafts:
                self._emit(now, "accept", request, f"of {len(chunk.drafts)}", len(verified.tokens) - 1)
            request.num_computed = verified.computed
            if pages := self.cache.advance(request.request_id, request.num_computed):
                self._emit(now, "release", request, "behind every window", pages=pages)
            for token in verified.tokens if chunk.samples else ():
                outputs.append(self._take(request, token, now))
                if request.finish_reason:
                    break
        return outputs

    def abort(self, request_id: str, now: float) -> bool:
        """Whether a live request of that id was ended."""
        for request in (*self.running, *self.waiting):
            if request.request_id == request_id:
                self._finish(request, "abort", now, "asked for")
                return True
        return False

    def truncate(self, request_id: str, tokens: int, now: float) -> Restart:
        """Where the request goes on after only its first `tokens` tokens were kept; the rest is picked anew.

        Raises:
            ValueError: no live request of that id, a length outside its output, or a cache that cannot step back
                that far (see `KVCacheManager.truncate`). Nothing has changed then.
        """
        request = next((r for r in (*self.running, *self.waiting) if r.request_id == request_id), None)
        if request is None:
            raise ValueError(f"request {request_id}: must be alive")
        if not request.num_prompt <= tokens <= len(request.tokens):
            raise ValueError(
                f"tokens {tokens}: must be from the prompt's {request.num_prompt} to the {len(request.tokens)} there are"
            )
        # the last token that stays is known but not in the cache
        before, length = request.num_computed, min(request.num_computed, tokens - 1)
        restart = self.cache.truncate(request_id, length) if before else Restart(0)
        del request.tokens[tokens:]
        request.num_computed = restart.computed
        self._emit(now, "rollback", request, f"{tokens} tokens stay", before - restart.computed)
        return restart

    def _take(self, request: Request, token: int | None, now: float) -> Output:
        if token is None:
            request.error = "logits are not finite"
            self._finish(request, "error", now, request.error)
            return Output(request.request_id, None, "error")
        request.tokens.append(token)
        self._emit(now, "token", request, tokens=token)
        reason = request.ends_with(token)
        if reason:
            why = f"token {token}" if reason == "stop" else f"{len(request.tokens)} tokens"
            self._finish(request, reason, now, why)
        return Output(request.request_id, token, reason)

    def _count(self, request: Request, budget: int) -> tuple[int, bool]:
        """Tokens of the request's next chunk, and whether its state is kept after them: a chunk ends where it is."""
        count = min(request.num_missing, budget)
        if not self.cache.keeps_states:
            return count, False
        keep = self.cache.rollback.next_after(request.num_computed, request.num_prompt)
        if keep is None or keep > request.num_computed + count:
            return count, False
        return keep - request.num_computed, True

    def _chunk(self, now: float, request: Request, count: int, keeps_state: bool) -> Chunk:
        left = request.num_missing - count
        self._emit(now, "chunk", request, f"{left} tokens left" if left else "", tokens=count)
        return Chunk(request, request.num_computed, count, not left, keeps_state)

    def _with_drafts(self, now: float, chunk: Chunk, room: int) -> Chunk:
        """`chunk` with the request's drafts that fit the step's room, the request's length and the free pages."""
        request, known = chunk.request, len(chunk.request.tokens)
        # one more token is picked behind the last draft
        room = min(room, request.max_total - 1 - known)
        keep = self.cache.rollback.next_after(known, request.num_prompt) if self.cache.keeps_states else None
        if keep is not None:
            # the state that is to be kept must have seen no draft
            room = min(room, keep - 1 - known)
        drafts = request.drafts[: max(0, room)]
        if not drafts or not self.cache.drafts.allocate(request.request_id, known, len(drafts)):
            return chunk
        self._emit(now, "draft", request, tokens=len(drafts))
        return replace(chunk, count=chunk.count + len(drafts), drafts=drafts)

    def _may_admit(self, now: float) -> bool:
        request = self.waiting[0]
        reason = ""
        if self._alone and not self._alone.finish_reason and request is not self._alone:
            reason = f"request {self._alone.request_id} needs the pool to itself"
        elif len(self.running) >= self.limits.max_num_seqs:
            reason = f"max_num_seqs {self.limits.max_num_seqs} requests run"
        elif not self.cache.has_room(len(request.tokens), spare=len(self.running)):
            reason = f"{len(request.tokens)} tokens and a page for each running request do not fit now"
        if reason and self._last_wait != (request.request_id, reason):
            self._last_wait = (request.request_id, reason)
            self._emit(now, "wait", request, reason)
        return not reason

    def _preempt(self, now: float, asking: Request) -> Request:
        """The last arrived of the running requests, after it lost its pages and went to the head of the queue."""
        victim = self.running.pop()
        if not self.running:
            self._alone = victim
        pages = self.cache.free(victim.request_id)
        self._emit(now, "preempt", victim, f"{asking.request_id} needs pages", victim.num_computed, pages)
        victim.num_computed = 0
        self.waiting.appendleft(victim)
        return victim

    def _finish(self, request: Request, finish_reason: str, now: float, reason: str) -> None:
        request.finish_reason = finish_reason
        (self.running if request in self.running else self.waiting).remove(request)
        pages = self.cache.free(request.request_id)
        self._emit(now, "finish", request, f"{finish_reason}: {reason}", len(request.tokens), pages)

    def _emit(self, now: float, kind: str, request: Request, reason: str = "", tokens: int = 0, pages: int = 0) -> None:
        self.events.emit(Event(self.step_number, now, kind, request.request_id, reason, tokens, pages))
