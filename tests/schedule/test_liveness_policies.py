"""Under every policy every accepted request finishes, whatever the copies do, and reads only what it wrote itself.

No model: pages hold notes of the tokens that led to them (`tests/helpers/pretend.py`), and copies to the tier below
happen at random times, in any order.
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
from kvlab.specs.parts import Attention, CompressedEntries, RecurrentState, SlidingWindow, StateArray
from kvlab.specs.pools import POOLS, pool_layout
from kvlab.specs.rollback import RollbackPolicy

BF16 = get_format("bf16")
FULL, WINDOW = Attention(2, 8, 8, BF16), SlidingWindow(2, 8, 8, BF16, window=5)
STATE = RecurrentState("mamba2", (StateArray("x", ((40, 1),), 3, BF16),))
PARTS = {
    "full": (FULL,),
    "both": (FULL, WINDOW),
    "state": (FULL, STATE),
    "all": (FULL, WINDOW, STATE, CompressedEntries(2, 16, BF16)),
}
TOKENS = 20


class World:
    """A scheduler over pretended memory and copies."""

    def __init__(self, rng, kind, *, sure=False):
        self.rng = rng
        layers = tuple(LayerSpec(i, (part,)) for i, part in enumerate(PARTS[kind]))
        spec = ModelSpec("tiny", "llama", layers, 32, 4, 100)
        layout = pool_layout(spec, rng.choice([2, 4] if kind == "all" else [1, 2, 3, 4]), rng.choice(POOLS))
        limits = Limits(rng.randint(1, 5), rng.randint(1, 12), rng.randint(8, 40))
        shared = len(layout.groups) if layout.policy == "unified" else 1
        blocks = [rng.randint(4, 16) * shared for _ in layout.buffers]
        rollback = rng.choice([RollbackPolicy(), RollbackPolicy(0, 4, True), RollbackPolicy(3, 2, checkpoints_kept=3)])
        in_flight = min(limits.max_batched_tokens, limits.max_model_len)
        prefix = rng.choice([None, PrefixOptions(rng.choice(DESIGNS), rng.choice(EVICTIONS))])
        self.cache = KVCacheManager(layout, blocks, in_flight, rollback=rollback, prefix=prefix)
        self.memory = Memory(self.cache)
        self.copier = LateCopier(self.memory, rng, sure)
        sizes = [layout.page_bytes(g) for g in range(len(layout.groups))]
        slots = HostSlots(layout, max(sizes) * rng.choice([1, 10, 100]))
        tiers = rng.choice([None, Tiers(self.cache, slots, self.copier), Tiers(self.cache, slots, self.copier)])
        costs = SwapCosts(1e6, 1e6, lambda n: rng.choice([1, 1000]) * n)
        self.policy = SchedulingPolicy(rng.choice(ORDERS), rng.choice(VICTIMS), rng.choice(PREEMPT), costs, 2)
        self.scheduler = Scheduler(self.cache, limits, EventLog(), self.policy, tiers)

    def advance(self):
        scheduler = self.scheduler
        self.copier.tick()
        if not scheduler.has_work:
            return
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
            scheduler.preempt(self.rng.choice(step.chunks).request.request_id, 0.0)
        scheduler.update(step, [self.rng.randrange(TOKENS) for _ in step.sampling], 0.0)
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
@pytest.mark.parametrize("seed", range(40))
def test_every_accepted_request_finishes(kind, seed):
    rng = random.Random(f"{kind} {seed}")
    world = World(rng, kind, sure=seed % 4 == 0)
    scheduler, accepted, work = world.scheduler, [], 0
    texts = [[rng.randrange(1, TOKENS) for _ in range(30)] for _ in range(2)]
    for arrival in range(20):
        prompt = rng.choice(texts)[: rng.randint(1, 30)]
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
    assert world.cache.num_free == sum(units.num_blocks - 1 for units in world.cache.unit_pools)
