"""The real scheduler and cache manager with a clock instead of a model: a trace on hardware that is not here.

    trace -> arrivals -> Scheduler.schedule(now) -> StepClock.seconds(step) -> now -> Scheduler.update -> ...

No token is computed: a request's tokens are its blocks' hash ids, so that equal blocks are equal prefixes, and what it
generates is a token of its own. The text of an answer is therefore never found again by a later prompt, except where
the trace's own ids say so.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvlab.cache import KVCacheManager
from kvlab.cache.prefix import PrefixOptions
from kvlab.plan.plan import Plan, make_plan
from kvlab.schedule import Event, EventLog, Request, SamplingParams, Scheduler, SparedTokens, Step
from kvlab.simulate.clock import Machine, StepClock
from kvlab.simulate.options import SimulateOptions, simulate_options
from kvlab.simulate.runs import DecodeRuns
from kvlab.simulate.summary import Timed, summary
from kvlab.simulate.traces import Trace, TraceRequest
from kvlab.specs.pools import PoolLayout, pool_layout
from kvlab.specs.units import human_bytes

Progress = Callable[[int, int, float], object]
"""(requests ended, requests, simulated seconds) -> true to stop."""
EVERY = 256
PAGE = 64
OWN = 2**30  # hash ids are below


@dataclass(frozen=True)
class Simulation:
    """What a trace came to.

    Attributes:
        requests: as they went, in order of arrival. steps: of the scheduler.
        busy_s: simulated seconds in steps. bound_share: of these, by what bounds a step.
        counts: tokens found in the prefix cache, preemptions, tokens computed again, peak bytes.
        facts: pool, limits and machine. cancelled: whether it was stopped before the end.
    """

    requests: tuple[Timed, ...]
    steps: int
    busy_s: float
    bound_share: dict[str, float]
    counts: dict[str, int]
    facts: dict[str, Any]
    options: SimulateOptions
    cancelled: bool = False

    def to_json(self) -> dict[str, Any]:
        """The dict that `kvlab simulate --json` prints."""
        found = summary(self.requests, self.options.objective)
        prompts = self.counts["prompt_tokens_started"]
        return {
            "simulated": self.facts,
            "cancelled": self.cancelled,
            **found,
            "steps": self.steps,
            "busy_share": self.busy_s / found["seconds"] if found["seconds"] else None,
            "bound_share": self.bound_share,
            "prefix_hit_rate": self.counts["hit_tokens"] / prompts if prompts else None,
            **self.counts,
        }


class Simulator:
    """One run.

    Args:
        trace: with arrivals.
        plan: the model and the machine that holds it.
        options: limits, pools, prefix cache.
        machine: measured rates instead of the vendor's.
        fast: takes runs of equal steps at once (`kvlab.simulate.runs`); the result is the same.

    Raises:
        ValueError: the weights leave no room, a mechanism without a block table, parallel degrees beside tp, a trace
            without arrivals.
    """

    def __init__(
        self, trace: Trace, plan: Plan, options: SimulateOptions | None = None, machine: Machine | None = None,
        fast: bool = True,
    ) -> None:  # fmt: skip
        self.options = options or SimulateOptions()
        if not trace.timed:
            raise ValueError(f"{trace.name}: has no arrival times; give a rate")
        self.trace, self.plan = trace, plan
        self.clock = StepClock(plan, machine)
        self.limits = self.options.limits(plan.model.max_position)
        self.layout = pool_layout(plan.stages[0], plan.options.block_size or 16, self.options.pools)
        self.num_blocks = self._size_pool()
        self.cache = self._manager()
        # a million of these, and nobody asks
        self.events = EventLog(64, only_counted=("chunk", "token", "evict"))
        self.events.subscribe(self._hear)
        self.scheduler = Scheduler(self.cache, self.limits, self.events)
        self.counts = dict.fromkeys(
            ("hit_tokens", "prompt_tokens_started", "preemptions", "preempted_tokens", "peak_kv_bytes", "refused"), 0
        )
        self._fast, self._runs = fast, DecodeRuns(self.scheduler, self.clock, own_token)
        self._next, self._done, self._busy = 0, 0, 0.0
        self._bound = dict.fromkeys(("weights", "cache", "compute"), 0.0)
        self._timed: dict[str, Timed] = {}
        self._spared = SparedTokens()

    def run(self, progress: Progress | None = None) -> Simulation:
        """The whole trace, or as far as `progress` lets it go."""
        now, calls, cancelled = 0.0, 0, False
        while self._next < len(self.trace.requests) or self.scheduler.has_work:
            self._arrivals(now)
            if not self.scheduler.has_work:
                # nobody is here: the clock jumps to the next arrival
                now = max(now, self._next_arrival)
                continue
            now = self._step(now)
            calls += 1
            if progress and not calls % EVERY and progress(self._done, len(self.trace.requests), now):
                cancelled = True
                break
        bound = {name: value / self._busy for name, value in self._bound.items()} if self._busy else {}
        requests = tuple(self._timed.values())
        steps = self.scheduler.step_number
        return Simulation(requests, steps, self._busy, bound, self.counts, self._facts(), self.options, cancelled)

    @property
    def _next_arrival(self) -> float:
        rows = self.trace.requests
        return rows[self._next].arrival_s if self._next < len(rows) else math.inf

    def _arrivals(self, now: float) -> None:
        while self._next_arrival <= now:
            self._done += not self._arrive(self._next, self.trace.requests[self._next])
            self._next += 1

    def _step(self, now: float) -> float:
        """The time after one step, and after the run of equal steps behind it."""
        step = self.scheduler.schedule(now)
        self._note_peak(self.cache.held_bytes)
        seconds, bound_by = self.clock.timed(step.chunks)
        self._spend(seconds, bound_by)
        ended = self._finish_step(step, now + seconds)
        self._done += ended
        now += seconds
        if not (self._fast and self._runs.may_follow(step, ended)):
            return now
        # where an arrival can only wait, it need not end the run
        times = self._runs.take(now, self._next_arrival if self._runs.open_queue else math.inf)
        for request in self.scheduler.running if times else ():
            self._timed[request.request_id].token_s.extend(times)
        self._note_peak(self._runs.peak_kv_bytes)
        # which bound holds hardly changes within a run of decodes
        self._spend((times[-1] if times else now) - now, bound_by)
        return times[-1] if times else now

    def _spend(self, seconds: float, bound_by: str) -> None:
        self._busy += seconds
        self._bound[bound_by] += seconds

    def _note_peak(self, held_bytes: int) -> None:
        self.counts["peak_kv_bytes"] = max(self.counts["peak_kv_bytes"], held_bytes)

    def _arrive(self, index: int, row: TraceRequest) -> bool:
        request_id = str(index)
        params = SamplingParams(max_tokens=row.output_tokens, ignore_eos=True)
        request = Request(request_id, prompt_tokens(row, index, self.trace.block_tokens), params)
        self._timed[request_id] = timed = Timed(row.prompt_tokens, row.output_tokens, row.arrival_s)
        try:
            self.scheduler.add(request, row.arrival_s)
        except ValueError:
            self.counts["refused"] += 1
            timed.error = "refused: too long for the model or the pool"
            return False
        return True

    def _finish_step(self, step: Step, now: float) -> int:
        """How many requests ended with this step."""
        tokens = [own_token(chunk.request.request_id) for chunk in step.chunks if chunk.samples]
        ended = 0
        for output in self.scheduler.update(step, tokens, now):
            self._timed[output.request_id].token_s.append(now)
            ended += output.finish_reason is not None
        return ended

    def _hear(self, event: Event) -> None:
        spared = self._spared.hear(event)
        if spared is not None:
            self.counts["prompt_tokens_started"] += self._timed[event.request_id].prompt_tokens
            self.counts["hit_tokens"] += sum(spared.values())
        elif event.kind == "preempt":
            self.counts["preemptions"] += 1
            self.counts["preempted_tokens"] += event.tokens

    def _size_pool(self) -> tuple[int, ...]:
        """Units of the pool that fit beside the weights, null unit included; never more than everybody could fill."""
        if len(self.layout.buffers) > 1:
            raise ValueError("pools 'per_kind': must be unified or sectors where layers are of several kinds")
        memory, unit, own = self.plan.memory, self.layout.unit_bytes[0], self.options.kv_bytes
        if asked := self.options.num_blocks:
            if asked * unit > memory.memory_bytes:
                raise ValueError(
                    f"num_blocks {asked}: takes {human_bytes(asked * unit)} of each GPU, which has "
                    f"{human_bytes(memory.memory_bytes)}"
                )
            return (asked,)
        blocks = (memory.free_bytes if own is None else own) // unit
        if blocks < 2 and own is not None:
            raise ValueError(f"kv_bytes {own}: must hold 2 pages of {human_bytes(unit)}")
        if blocks < 2:
            raise ValueError(
                f"gpu {self.plan.options.gpu}: weights of {human_bytes(memory.weights_bytes)} and a reserve of "
                f"{human_bytes(memory.reserve_bytes)} leave {human_bytes(max(0, memory.free_bytes))} of "
                f"{human_bytes(memory.usable_bytes)} usable, no room for a cache of 2 pages of {human_bytes(unit)}; use more "
                f"GPUs (--tp), fewer bits (--weight-dtype), a smaller reserve or smaller pages"
            )
        return (blocks,)

    def _manager(self) -> KVCacheManager:
        in_flight = min(self.limits.max_batched_tokens, self.limits.max_model_len)
        return make_manager(self.layout, self.num_blocks, in_flight, self.options)

    def _facts(self) -> dict[str, Any]:
        o, clock = self.plan.options, self.clock
        return {
            "trace": self.trace.name,
            "kind": self.trace.kind,
            "skipped_rows": dict(self.trace.skipped),
            "model": self.plan.model.name,
            "gpu": clock.machine.name or o.gpu,
            "tp": o.tp,
            "weight_dtype": o.weight_dtype,
            "kv_dtype": o.kv_dtype,
            "weights_bytes_per_gpu": self.plan.memory.weights_bytes,
            "kv_pool_bytes_per_gpu": self.layout.pool_bytes(self.num_blocks),
            "num_blocks": list(self.num_blocks),
            "block_size": o.block_size,
            "prefix_cache": self.options.prefix,
            "max_num_seqs": self.limits.max_num_seqs,
            "max_batched_tokens": self.limits.max_batched_tokens,
            "max_model_len": self.limits.max_model_len,
            "bandwidth_bytes_per_s": clock.machine.bandwidth,
            "flops": clock.machine.flops,
            "step_overhead_s": clock.machine.overhead_s,
            "clock": clock.machine.source,
        }


def make_manager(
    layout: PoolLayout, num_blocks: tuple[int, ...], in_flight: int, options: SimulateOptions
) -> KVCacheManager:
    """The cache manager of a simulation, with a prefix cache where `options` ask for one."""
    prefix = None if options.prefix == "off" else PrefixOptions(design=options.prefix)
    return KVCacheManager(layout, num_blocks, in_flight, prefix=prefix)


def own_token(request_id: str) -> int:
    """The token that a request generates, again and again: nobody else's."""
    return OWN + 2 * int(request_id) + 1


def prompt_tokens(row: TraceRequest, index: int, block: int) -> array[int]:
    """Token ids of a prompt: each hash id as often as its block has tokens; a number of its own where there are none."""
    if not row.hash_ids:
        return array("i", [OWN + 2 * index]) * row.prompt_tokens
    tokens: array[int] = array("i")
    for hash_id in row.hash_ids:
        tokens.extend(array("i", [hash_id]) * block)
    return tokens[: row.prompt_tokens]


def simulate(trace: Trace, model: str, progress: Progress | None = None, **options: Any) -> Simulation:
    """What `trace` comes to on `model`, with the options of `kvlab simulate` by name.

    Those of `SimulateOptions` set up the scheduler, those of `kvlab.plan.make_plan` the machine.

    Raises:
        ValueError: as `Simulator` and `make_plan`.
    """
    own, of_plan = simulate_options(options)
    return Simulator(trace, simulated_plan(model, own, of_plan), own).run(progress)


def simulated_plan(model: str | dict[str, Any], own: SimulateOptions, of_plan: dict[str, Any]) -> Plan:
    """The plan of a simulation: pages of 64 tokens unless a size is named or the model needs another.

    A quarter of the pages of 16 to keep books of; traces share prefixes in blocks that 64 divides.
    """
    plan = make_plan(model, max_batched_tokens=own.max_batched_tokens, **of_plan)
    if "block_size" in of_plan or plan.options.block_size != 16:
        return plan
    return replace(plan, options=replace(plan.options, block_size=PAGE))
