"""The engine's numbers for Prometheus: vLLM's names and types where vLLM has the number, `kvlab:` for our own.

All are fed by a sink of the event log, so a step pays for the events it has and nothing is polled on its way. Gauges of
the pool ask the cache when somebody scrapes. Times are the events' own, on the engine's side: the network is not in them.
Source: vLLM 0.33 v1/metrics/loggers.py; a registry of its own for each engine, not the process's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvlab.engine import Engine
from kvlab.schedule import Event, SparedTokens
from kvlab.schedule.spared import SOURCES
from kvlab.serve.buckets import context_label
from kvlab.serve.catalogue import Instruments

PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
"""vLLM's words: computed, found in the pool, brought from a tier below."""


@dataclass(slots=True)
class Seen:
    """What the events told of one live request. Times in seconds of the engine's clock, None until it happened."""

    arrived: float
    prompt: int
    admitted: float | None = None
    first: float | None = None
    last: float = 0.0
    step: int = 0
    tokens: int = 0
    computed: int = 0
    spared: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    running: bool = False
    allowed: int | None = None
    prompt_of: Completions | None = None


@dataclass(slots=True)
class Completions:
    """The completions of one prompt: how many, how many of them are alive, tokens of the longest that ended."""

    n: int = 1
    alive: int = 1
    longest: int = 0


class EngineMetrics:
    """Counts what an engine does, from its events.

    Args:
        engine: with no request alive.
        model_name: the label of every series.

    Attributes:
        registry: of this engine alone.
        instruments: the metrics by short name.
    """

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.engine, self.registry = engine, CollectorRegistry()
        self.instruments = Instruments(self.registry, model_name, engine)
        self._live: dict[str, Seen] = {}
        self._spared = SparedTokens()
        for source in SOURCES:
            # a counter that nobody touched is not written out
            self.instruments.cached_by_source.labels(source)
        for source in PROMPT_SOURCES:
            self.instruments.prompt_by_source.labels(source)
        # whoever waits here waits for pages or a place
        self.instruments.waiting_by_reason.labels("deferred").set(0)
        self._waiting = self._running = 0
        self._step, self._step_tokens = 0, 0
        self._on: dict[str, Callable[[Event], None]] = {
            kind: getattr(self, f"_{kind}")
            for kind in ("arrive", "refuse", "admit", "chunk", "token", "preempt", "draft", "accept", "finish")
        }
        self.close = engine.events.subscribe(self.hear)

    def hear(self, event: Event) -> None:
        """The sink."""
        spared = self._spared.hear(event)
        if spared and (seen := self._live.get(event.request_id)):
            seen.spared = spared
        if act := self._on.get(event.kind):
            act(event)

    def exposition(self) -> tuple[bytes, str]:
        """The text that Prometheus scrapes, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def reject(self, reason: str) -> None:
        """Counts a call that never reached the engine."""
        self.instruments.rejections.labels(reason).inc()

    def together(self, request_ids: Sequence[str]) -> None:
        """Told of live requests that they are the completions of one prompt; without it each is its own."""
        group = Completions(len(request_ids), len(request_ids))
        for request_id in request_ids:
            self._live[request_id].prompt_of = group
            self._note_limit(request_id)

    def _note_limit(self, request_id: str) -> None:
        if request := self.engine.requests.get(request_id):
            self._live[request_id].allowed = request.params.max_tokens

    # one method per kind of event

    def _arrive(self, event: Event) -> None:
        self._live[event.request_id] = Seen(event.now, event.tokens)
        self._queue(1, 0)

    def _refuse(self, event: Event) -> None:
        self.reject("too_long")

    def _admit(self, event: Event) -> None:
        if not (seen := self._live.get(event.request_id)):
            return
        seen.running = True
        self._queue(-1, 1)
        if seen.admitted is None:
            seen.admitted = event.now
            self.instruments.queue_time.observe(event.now - seen.arrived)
            self._note_limit(event.request_id)

    def _chunk(self, event: Event) -> None:
        # a step's tokens are known when the next step begins
        if event.step != self._step:
            if self._step_tokens:
                self.instruments.iteration_tokens.observe(self._step_tokens)
            self._step, self._step_tokens = event.step, 0
        self._step_tokens += event.tokens
        if (seen := self._live.get(event.request_id)) and seen.first is None:
            seen.computed += event.tokens

    def _token(self, event: Event) -> None:
        if not (seen := self._live.get(event.request_id)):
            return
        if seen.first is None:
            self._first_token(event, seen)
            seen.step = event.step
        elif event.step != seen.step:
            # as vLLM: one gap for each step that brought tokens, however many drafts were right in it
            self.instruments.inter_token.observe(event.now - seen.last)
            seen.step = event.step
        seen.last = event.now
        seen.tokens += 1
        self.instruments.generation_tokens.inc()

    def _first_token(self, event: Event, seen: Seen) -> None:
        seen.first = event.now
        own = self.instruments
        waited = event.now - seen.arrived
        own.ttft.observe(waited)
        own.ttft_by_context.labels(context_label(seen.prompt)).observe(waited)
        own.prompt_tokens.inc(seen.prompt)
        own.prefill_computed.observe(seen.computed)
        found, local = sum(seen.spared.values()), seen.spared.get("device", 0)
        if self.caches_prefixes:
            own.prefix_queries.inc(seen.prompt)
            own.prefix_hits.inc(local)
        if self.engine.tiers and self.engine.tiers.saves:
            own.external_queries.inc(seen.prompt - local)
            own.external_hits.inc(found - local)
        own.prompt_tokens_cached.inc(found)
        for source, tokens in zip(PROMPT_SOURCES, (seen.prompt - found, local, found - local), strict=True):
            own.prompt_by_source.labels(source).inc(tokens)
        for source, tokens in seen.spared.items():
            own.cached_by_source.labels(source).inc(tokens)

    def _preempt(self, event: Event) -> None:
        own = self.instruments
        own.preemptions.inc()
        own.preempted_tokens.inc(event.tokens)
        if seen := self._live.get(event.request_id):
            seen.preemptions += 1
            if seen.running:
                seen.running = False
                self._queue(1, -1)

    def _draft(self, event: Event) -> None:
        self.instruments.drafts.inc()
        self.instruments.draft_tokens.inc(event.tokens)

    def _accept(self, event: Event) -> None:
        self.instruments.accepted_tokens.inc(event.tokens)
        for position in range(event.tokens):
            self.instruments.accepted_at.labels(str(position)).inc()

    def _finish(self, event: Event) -> None:
        if not (seen := self._live.pop(event.request_id, None)):
            return
        self._queue(0, -1) if seen.running else self._queue(-1, 0)
        own, how = self.instruments, event.reason.partition(":")[0]
        own.success.labels(how).inc()
        # an admitted request ends in an error for no other reason
        own.corrupted.inc(how == "error")
        self._end_of_prompt(seen)
        if seen.allowed is not None:
            own.params_max_tokens.observe(seen.allowed)
        own.e2e.observe(event.now - seen.arrived)
        own.request_prompt.observe(seen.prompt)
        own.request_generation.observe(seen.tokens)
        own.request_preemptions.observe(seen.preemptions)
        if seen.admitted is not None:
            own.inference_time.observe(event.now - seen.admitted)
        if seen.first is not None and seen.admitted is not None:
            own.prefill_time.observe(seen.first - seen.admitted)
            own.decode_time.observe(seen.last - seen.first)
        if seen.tokens > 1 and seen.first is not None:
            own.time_per_output_token.observe((seen.last - seen.first) / (seen.tokens - 1))

    def _end_of_prompt(self, seen: Seen) -> None:
        """As vLLM (v1/engine/parallel_sampling.py): once for each prompt, when its last completion has ended."""
        group = seen.prompt_of or Completions()
        group.alive -= 1
        group.longest = max(group.longest, seen.tokens)
        if not group.alive:
            self.instruments.params_n.observe(group.n)
            self.instruments.max_generation.observe(group.longest)

    @property
    def caches_prefixes(self) -> bool:
        """Whether the engine looks prompts up at all."""
        return bool(getattr(self.engine.options, "prefix", None))

    def _queue(self, waiting: int, running: int) -> None:
        self._waiting += waiting
        self._running += running
        self.instruments.waiting.set(self._waiting)
        self.instruments.waiting_by_reason.labels("capacity").set(self._waiting)
        self.instruments.running.set(self._running)
