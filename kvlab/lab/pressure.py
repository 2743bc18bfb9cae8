"""Requests that want more cache than there is, on a machine that is not here: what each policy makes of it.

The real scheduler, cache and tiers run with the roofline clock of `kvlab.simulate` and with copies that take their
bytes over the link's rate, one after the other in each direction, while steps go on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.cache import KVCacheManager
from kvlab.cache.tiers import HostSlots, Tiers
from kvlab.cache.tiers.tiers import Move
from kvlab.plan import make_plan
from kvlab.schedule import EventLog, Limits, Request, SamplingParams, Scheduler, SchedulingPolicy, SwapCosts
from kvlab.simulate.clock import StepClock
from kvlab.simulate.summary import percentile
from kvlab.specs.pools import pool_layout


@dataclass(frozen=True)
class Load:
    """One request of a load: when, how long, how urgent (lower is more)."""

    arrival_s: float
    prompt: int
    output: int
    priority: int = 0


@dataclass(frozen=True)
class Machine:
    """What the requests run on.

    Attributes:
        model, gpu: names that the planner knows. pages: of 16 tokens in the pool.
        link_bytes_per_s: to host memory, of which there are host_bytes.
        max_num_seqs, max_batched_tokens: of a step.
    """

    model: str = "llama-3.1-8b"
    gpu: str = "h100"
    pages: int = 2000
    link_bytes_per_s: float = 50e9
    host_bytes: int = 64 * 2**30
    max_num_seqs: int = 64
    max_batched_tokens: int = 2048


@dataclass(frozen=True)
class Outcome:
    """What a load came to.

    Attributes:
        seconds: simulated, until the last token. busy_share: of them in steps.
        preemptions, swaps: victims, and those of them that were moved.
        lost_tokens: computed and thrown away. computed_tokens: all that were computed.
        moved_bytes: over the link, both ways.
        ttft_s, e2e_s: 50th and 99th percentile of the time to the first token and to the last.
        finished: by request, when its last token came.
    """

    seconds: float
    busy_share: float
    preemptions: int
    swaps: int
    lost_tokens: int
    computed_tokens: int
    moved_bytes: int
    ttft_s: tuple[float, float]
    e2e_s: tuple[float, float]
    finished: dict[str, float]


def burst(count: int, rate: float, seed: int = 0, prompt: int = 600, output: int = 300) -> list[Load]:
    """`count` requests that arrive at `rate` a second on average, lengths spread around their medians."""
    rng, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        lengths = [max(16, int(rng.lognormvariate(0, 0.6) * median)) for median in (prompt, output)]
        found.append(Load(now, min(lengths[0], 4000), min(lengths[1], 2000), rng.randrange(3)))
    return found


class LinkCopier:
    """Copies that take latency plus bytes over rate, queued in each direction. `now` is set by the run."""

    def __init__(self, slots: HostSlots, bytes_per_s: float, latency_s: float = 20e-6) -> None:
        self.slots, self.bytes_per_s, self.latency_s = slots, bytes_per_s, latency_s
        self.now, self.moved_bytes = 0.0, 0
        self._free_at = {True: 0.0, False: 0.0}
        self.ends: list[float] = []

    def start(self, moves: Sequence[Move], down: bool) -> float:
        """The time at which the copies end."""
        num_bytes = sum(self.slots.page_bytes[g] for g, _, _ in moves)
        self.moved_bytes += num_bytes
        end = max(self.now, self._free_at[down]) + self.latency_s + num_bytes / self.bytes_per_s
        self._free_at[down] = end
        self.ends.append(end)
        return end

    def done(self, ticket: float) -> bool:
        """Whether that time has come."""
        return ticket <= self.now

    def wait(self, ticket: float) -> None:
        """Lets the clock go on to that time."""
        self.now = max(self.now, ticket)

    def memory(self, group: int, slot: int) -> memoryview:
        """No bytes are kept."""
        raise NotImplementedError("a simulated tier holds no bytes")


class _Run:
    """One load on one machine under one policy."""

    def __init__(self, load: Sequence[Load], machine: Machine, policy: SchedulingPolicy) -> None:
        plan = make_plan(machine.model, gpu=machine.gpu, context=8192)
        self.load, self.clock, self.now, self.busy = load, StepClock(plan), 0.0, 0.0
        layout = pool_layout(plan.model, 16, "unified")
        limits = Limits(machine.max_num_seqs, machine.max_batched_tokens, 8192)
        cache = KVCacheManager(layout, [machine.pages + 1], limits.max_batched_tokens)
        slots = HostSlots(layout, machine.host_bytes)
        self.copier = LinkCopier(slots, machine.link_bytes_per_s)
        self.scheduler = Scheduler(cache, limits, EventLog(64), policy, Tiers(cache, slots, self.copier, saves=False))
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.lost, self.computed, self._next = 0, 0, 0
        self.scheduler.events.subscribe(self._hear)

    def _hear(self, event) -> None:
        if event.kind == "preempt":
            self.lost += event.tokens

    def go(self) -> Outcome:
        while self._next < len(self.load) or self.scheduler.has_work:
            self._arrive()
            if not self.scheduler.has_work:
                self.now = self.load[self._next].arrival_s
                continue
            self.copier.now = self.now
            step = self.scheduler.schedule(self.now)
            if not step.chunks:
                # everybody waits for copies: until the next one ends
                self.now = min(end for end in self.copier.ends if end > self.now)
                continue
            seconds = self.clock.seconds(step.chunks)
            self.now, self.busy = self.now + seconds, self.busy + seconds
            self.computed += step.num_tokens
            for output in self.scheduler.update(step, [1] * len(step.sampling), self.now):
                self.first.setdefault(output.request_id, self.now)
                self.last[output.request_id] = self.now
        return self._outcome()

    def _arrive(self) -> None:
        while self._next < len(self.load) and self.load[self._next].arrival_s <= self.now:
            one = self.load[self._next]
            params = SamplingParams(one.output, ignore_eos=True)
            request = Request(str(self._next), [1] * one.prompt, params, priority=one.priority, arrival=one.arrival_s)
            self.scheduler.add(request, self.now)
            self._next += 1

    def _outcome(self) -> Outcome:
        counts, arrived = self.scheduler.events.counts, {str(i): one.arrival_s for i, one in enumerate(self.load)}
        ttft = sorted(self.first[i] - arrived[i] for i in arrived)
        e2e = sorted(self.last[i] - arrived[i] for i in arrived)
        return Outcome(
            self.now, self.busy / self.now, counts["preempt"], counts["swap_out"], self.lost, self.computed,
            self.copier.moved_bytes, (percentile(ttft, 50), percentile(ttft, 99)),
            (percentile(e2e, 50), percentile(e2e, 99)), dict(self.last),
        )  # fmt: skip


def under_pressure(load: Sequence[Load], machine: Machine, policy: SchedulingPolicy) -> Outcome:
    """What `load` comes to on `machine` under `policy`.

    Raises:
        ValueError: a request that can never fit the pool, or a model that the planner does not know.
    """
    return _Run(load, machine, policy).go()


def costs_of(machine: Machine) -> SwapCosts:
    """What moving and computing cost on that machine, at the rates that its clock uses."""
    clock = StepClock(make_plan(machine.model, gpu=machine.gpu, context=8192))
    weights = clock.plan.weights.total - clock.plan.weights.embedding

    def operations(tokens: int) -> float:
        return 2 * weights * tokens + clock.prompt_operations(tokens)

    return SwapCosts(machine.link_bytes_per_s, clock.machine.flops, operations, 20e-6)
