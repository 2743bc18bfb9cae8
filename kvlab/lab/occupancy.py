"""How full a pool is under load: regions reserved ahead against pages, on the same requests. Counting only, no model.

The load is the harshest for an allocator: somebody always waits. Requests come first come, first served; a running one
gets a token a step. Regions are `kvlab.cache.contiguous`; pages are the engine's own scheduler and cache.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.cache import KVCacheManager
from kvlab.cache.contiguous import ContiguousPool, SlotUse, reserved_tokens, slot_use
from kvlab.schedule import EventLog, Limits, Request, SamplingParams, Scheduler
from kvlab.specs.formats import get_format
from kvlab.specs.layout import group_parts
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.pages import cdiv
from kvlab.specs.parts import Attention

Lengths = tuple[int, int]
"""(prompt tokens, output tokens) of a request."""


@dataclass(frozen=True)
class LengthMix:
    """Synthetic lengths: prompts and outputs log-normal, cut so that a request has at most `longest` tokens.

    The means are those before cutting; a sigma is the standard deviation of the logarithm.
    """

    prompt_mean: float
    prompt_sigma: float
    output_mean: float
    output_sigma: float
    longest: int

    def draw(self, count: int, seed: int = 0) -> list[Lengths]:
        """`count` requests; equal seeds give equal ones."""
        rng = random.Random(seed)
        drawn = []
        for _ in range(count):
            prompt, output = (
                max(1, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))
                for mean, sigma in ((self.prompt_mean, self.prompt_sigma), (self.output_mean, self.output_sigma))
            )
            prompt = min(prompt, self.longest - 1)
            drawn.append((prompt, min(output, self.longest - prompt)))
        return drawn


MIXES = {
    "chat": LengthMix(160, 1.0, 340, 0.8, 2048),
    "short answers": LengthMix(40, 0.8, 60, 0.8, 2048),
    "documents": LengthMix(1200, 0.4, 100, 0.8, 2048),
    "reasoning": LengthMix(150, 0.8, 700, 0.5, 2048),
}
"""Invented mixes, of no service; a figure that shows one shows its parameters."""


@dataclass(frozen=True)
class Occupancy:
    """Means over the steps in which the pool was in use and somebody waited.

    Attributes:
        use: shares of the slots, summing to 1, by the fields of `SlotUse`.
        in_flight: requests that held slots.
        steps: until all had ended. thrown_away: tokens computed and lost to preemption.
    """

    use: dict[str, float]
    in_flight: float
    steps: int
    thrown_away: int = 0


class _Means:
    def __init__(self) -> None:
        self.moments: list[tuple[SlotUse, int]] = []
        self.steps = 0

    def add(self, use: SlotUse, in_flight: int, counts: bool) -> None:
        self.steps += 1
        if counts:
            self.moments.append((use, in_flight))

    def result(self, thrown_away: int = 0) -> Occupancy:
        if not self.moments:
            raise ValueError("requests: too few, nobody ever waited behind one that had ended")
        sums = {f: sum(getattr(use, f) for use, _ in self.moments) for f in SlotUse.__dataclass_fields__}
        shares = {f: n / sum(sums.values()) for f, n in sums.items()}
        return Occupancy(shares, sum(n for _, n in self.moments) / len(self.moments), self.steps, thrown_away)


def contiguous(requests: Sequence[Lengths], capacity: int, rule: str, longest: int) -> Occupancy:
    """Occupancy of `capacity` slots when each request reserves a region by `rule` (see `kvlab.cache.contiguous.RULES`).

    Raises:
        ValueError: a request that the pool cannot hold, or too few of them to fill it.
    """
    pool, means = ContiguousPool(capacity), _Means()
    size = {str(i): reserved_tokens(rule, prompt, output, longest) for i, (prompt, output) in enumerate(requests)}
    if max(size.values()) > capacity:
        raise ValueError(f"capacity {capacity}: must hold the {max(size.values())} slots of the longest request")
    waiting = list(reversed(size))
    now: dict[str, int] = {}
    final = {str(i): prompt + output for i, (prompt, output) in enumerate(requests)}
    while waiting or now:
        while waiting and pool.reserve(waiting[-1], size[waiting[-1]]) is not None:
            name = waiting.pop()
            now[name] = requests[int(name)][0]
        ended = means.steps > 0 and len(waiting) + len(now) < len(requests)
        means.add(slot_use(pool, now, final, size[waiting[-1]] if waiting else 0), len(now), bool(waiting) and ended)
        for name in list(now):
            now[name] += 1
            if now[name] >= final[name]:
                pool.free(name)
                del now[name]
    return means.result()


def paged(requests: Sequence[Lengths], capacity: int, block_size: int, longest: int) -> Occupancy:
    """Occupancy of pages with `capacity` slots in all, under the engine's scheduler and cache.

    Raises:
        ValueError: a request that the pool cannot hold, or too few of them to fill it.
    """
    scheduler = _scheduler(capacity // block_size, block_size, longest, len(requests))
    final = {}
    for i, (prompt, output) in enumerate(requests):
        scheduler.add(Request(str(i), [0] * prompt, SamplingParams(max_tokens=output)), 0.0)
        final[str(i)] = prompt + output
    cache, means, lost = scheduler.cache, _Means(), 0
    while scheduler.has_work:
        step = scheduler.schedule(0.0)
        alive = len(scheduler.running) + len(scheduler.waiting)
        # as for regions: the moment when this step's tokens are there and nobody has left yet
        now = dict(cache.computed) | {c.request.request_id: c.start + c.count for c in step.chunks}
        use = _page_use(cache, now, final, block_size)
        means.add(use, len(cache.tables), bool(scheduler.waiting) and alive < len(requests))
        scheduler.update(step, [0] * len(step.sampling), 0.0)
    lost = sum(e.tokens for e in scheduler.events.of("preempt"))
    return means.result(lost)


def _page_use(cache: KVCacheManager, now: dict[str, int], final: dict[str, int], block_size: int) -> SlotUse:
    used = later = never = 0
    for name, (table,) in cache.tables.items():
        held = len(table) * block_size
        used += now[name]
        later += min(held, final[name]) - now[name]
        never += max(0, held - final[name])
    return SlotUse(used, later, never, short=cache.num_free * block_size)


def _scheduler(pages: int, block_size: int, longest: int, requests: int) -> Scheduler:
    part = Attention(1, 16, 16, get_format("bf16"))
    groups = group_parts(ModelSpec("counted", "llama", (LayerSpec(0, (part,)),), 16, 1, 100), block_size)
    budget = 64 * longest
    cache = KVCacheManager(groups, [pages + 1], min(budget, longest))
    return Scheduler(cache, Limits(requests, budget, longest), EventLog(100 * requests))


def tail_tokens(requests: Sequence[Lengths], block_size: int) -> float:
    """Mean slots of a sequence's last page that stay empty, at its full length."""
    return sum(cdiv(p + o, block_size) * block_size - (p + o) for p, o in requests) / len(requests)
