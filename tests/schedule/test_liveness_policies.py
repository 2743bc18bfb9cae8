"""Under every policy every accepted request finishes, whatever the copies do, and reads only what it wrote itself.

No model: pages hold notes of the tokens that led to them (`tests/helpers/pretend.py`), and copies to the tier below
happen at random times, in any order. Requests arrive, are aborted, preempted and cut back at random, with priorities, in
pools of a few pages; a tier is not there, holds what it is given, or holds it compressed.
"""

import random

import pytest
from pretend import LateCopier, Memory

from kvlab.cache import KVCacheManager
from kvlab.cache.prefix import DESIGNS, EVICTIONS, PrefixOptions
from kvlab.cache.tiers import HostSlots, Tiers
from kvlab.schedule import EventLog, Limits, Request, SamplingParams, Scheduler, SchedulingPolicy, SwapCosts
from kvlab.schedule.policy import ORDERS, PREEMPT, VICTIMS
from kvlab.specs.formats import get_format
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import (
    Attention,
    ChunkedLocal,
    CompressedEntries,
    IndexKeys,
    MLALatent,
    OpenBuffer,
    RecurrentState,
    SlidingWindow,
    StateArray,
)
from kvlab.specs.pools import POOLS, pool_layout
from kvlab.specs.rollback import RollbackPolicy

BF16 = get_format("bf16")
FULL, WINDOW = Attention(2, 8, 8, BF16), SlidingWindow(2, 8, 8, BF16, window=5)
ARRAY = (StateArray("x", ((40, 1),), 3, BF16),)
STATE, ENTRIES = RecurrentState("mamba2", ARRAY), CompressedEntries(2, 16, BF16)
PARTS = {
    "full": (FULL,), "latents": (MLALatent(24, 8, BF16), IndexKeys(16, BF16)), "windows": (WINDOW,),
    "both": (FULL, WINDOW), "chunks": (FULL, ChunkedLocal(2, 8, 8, BF16, chunk=6)), "state": (FULL, STATE),
    "states": (STATE,), "compressed": (WINDOW, ENTRIES, OpenBuffer(ARRAY, ratio=2)),
    "all": (FULL, WINDOW, STATE, ENTRIES),
}  # fmt: skip
TIERS = ("none", "swap", "compress")
TOKENS = 20


class World:
    """A scheduler over pretended memory and copies; `below` is one of `TIERS`."""

    def __init__(self, rng, kind, below, *, sure=False):
        self.rng = rng
        layers = tuple(LayerSpec(i, (part,)) for i, part in enumerate(PARTS[kind]))
        spec = ModelSpec("tiny", "llama", layers, 32, 4, 100)
        layout = pool_layout(
            spec, rng.choice([2, 4] if kind in ("all", "compressed") else [1, 2, 3, 4]), rng.choice(POOLS)
        )
        limits = Limits(rng.randint(1, 5), rng.randint(1, 12), rng.randint(8, 40))
        shared = len(layout.groups) if layout.policy == "unified" else 1
        blocks = [rng.randint(5, 18) * shared for _ in layout.buffers]
        rollback = rng.choice([RollbackPolicy(), RollbackPolicy(0, 4, True), RollbackPolicy(3, 2, checkpoints_kept=3)])
        in_flight = min(limits.max_batched_tokens, limits.max_model_len)
        prefix = rng.choice([None, PrefixOptions(rng.choice(DESIGNS), rng.choice(EVICTIONS))])
        self.cache = KVCacheManager(layout, blocks, in_flight, rollback=rollback, prefix=prefix)
        self.memory = Memory(self.cache)
        self.copier = LateCopier(self.memory, rng, sure)
        sizes = [layout.page_bytes(g) for g in range(len(layout.groups))]
        slots = HostSlots(layout, max(sizes) * (100 if below == "compress" else rng.choice([1, 10, 100])))
        lossy = {"saves": False, "lossy": "int8"} if below == "compress" else {}
        tiers = None if below == "none" else Tiers(self.cache, slots, self.copier, **lossy)
        costs = SwapCosts(1e6, 1e6, lambda n: rng.choice([1, 1000]) * n)
        preempt = "swap" if lossy else rng.choice(PREEMPT)
        victim = rng.choice([*VICTIMS, lambda requests: rng.choice(requests)])
        self.policy = SchedulingPolicy(rng.choice(ORDERS), victim, preempt, costs, 2)
        self.scheduler = Scheduler(self.cache, limits, EventLog(), self.policy, tiers)

    def advance(self):
        scheduler = self.scheduler
        self.copier.tick()
        if not scheduler.has_work:
            return
        if scheduler.running and self.rng.random() < 0.1:
            scheduler.preempt(self.rng.choice(scheduler.running).request_id, 0.0)
        step = scheduler.schedule(0.0)
        self.check(step)
        if not step.chunks:
            assert scheduler.copies_under_way, "nobody runs and nothing is under way"
            scheduler.tiers.wait()
            return
        # a copy may also happen between scheduling and computing, or after it
        if self.rng.random() < 0.3:
            self.copier.tick()
        self.memory.copy_pages(self.cache.take_copies())
        for chunk in step.chunks:
            self.memory.compute(chunk)
            if chunk.keeps_state:
                end = chunk.start + chunk.count
                self.memory.copy_pages(self.cache.copies_for(chunk.request.request_id, end))
        if self.rng.random() < 0.05:
            # its step is under way: its pages cannot move down
            scheduler.preempt(self.rng.choice(step.chunks).request.request_id, 0.0)
        scheduler.update(step, [self.rng.randrange(TOKENS) for _ in step.sampling], 0.0)
        self.cache.check_invariants()
        if scheduler.running and self.rng.random() < 0.1:
            self.step_back()

    def step_back(self):
        """A request loses some of its output, if its cache can do that; else nothing happens to it."""
        request = self.rng.choice([*self.scheduler.running, *self.scheduler.waiting])
        before = (request.num_computed, len(request.tokens))
        try:
            length = self.rng.randint(request.num_prompt, len(request.tokens))
            restart = self.scheduler.truncate(request.request_id, length, 0.0)
            self.memory.copy_pages(restart.copies)
        except ValueError:
            assert (request.num_computed, len(request.tokens)) == before
        self.cache.check_invariants()

    def check(self, step):
        limits, scheduler = self.scheduler.limits, self.scheduler
        assert step.num_tokens <= limits.max_batched_tokens and len(step.chunks) <= limits.max_num_seqs
        ids = [chunk.request.request_id for chunk in step.chunks]
        assert len(set(ids)) == len(ids)
        for chunk in step.chunks:
            assert chunk.request in scheduler.running and chunk.start == chunk.request.num_computed
            assert not scheduler.is_loading(chunk.request), "a request runs while its pages are being written"
        ranks = [self.policy.rank(r) for r in scheduler.running]
        assert ranks == sorted(ranks)


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("seed", range(18))
def test_every_accepted_request_finishes(kind, seed):
    rng = random.Random(f"{kind} {seed}")
    world = World(rng, kind, TIERS[seed % 3], sure=seed % 4 == 0)
    scheduler, accepted, work = world.scheduler, [], 0
    longest = min(30, scheduler.limits.max_model_len - 2)
    texts = [[rng.randrange(1, TOKENS) for _ in range(30)] for _ in range(2)]
    for arrival in range(20):
        prompt = rng.choice(texts)[: rng.randint(1, longest)]
        request = Request(
            str(arrival), prompt, SamplingParams(rng.randint(1, 12)), stop_ids=(0,), priority=rng.randrange(3)
        )
        try:
            scheduler.add(request, float(arrival))
            accepted.append(request)
            work += request.max_total
        except ValueError:
            assert request.finish_reason == "error"
        for _ in range(rng.randint(0, 3)):
            world.advance()
        if accepted and rng.random() < 0.15:
            scheduler.abort(rng.choice(accepted).request_id, 0.0)
            world.cache.check_invariants()
    for _ in range(60 * work):
        if not scheduler.has_work:
            break
        world.advance()
    assert not scheduler.has_work, world.policy
    assert all(r.finish_reason in ("stop", "length", "abort") for r in accepted)
    if scheduler.tiers:
        scheduler.tiers.wait()
        assert not scheduler.tiers._parked
    world.cache.check_invariants()
    if world.cache.prefix:
        world.cache.prefix.clear()
    assert seed not in (5, 11) or scheduler.events.counts["compress"]
    assert world.cache.num_free == sum(units.num_blocks - 1 for units in world.cache.unit_pools)
