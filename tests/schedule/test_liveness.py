"""Every accepted request finishes: random arrivals, aborts and tiny pools, with all invariants after each step."""

import random

import pytest

from kvlab.cache import KVCacheManager
from kvlab.schedule import EventLog, Limits, Request, SamplingParams, Scheduler
from kvlab.specs.formats import get_format
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import Attention, CompressedEntries, OpenBuffer, RecurrentState, SlidingWindow, StateArray
from kvlab.specs.pools import POOLS, pool_layout
from kvlab.specs.rollback import RollbackPolicy

BF16 = get_format("bf16")
FULL, WINDOW = Attention(2, 8, 8, BF16), SlidingWindow(2, 8, 8, BF16, window=5)
ARRAY = (StateArray("x", ((40, 1),), 3, BF16),)
PARTS = {
    "full": (FULL,),
    "window": (WINDOW,),
    "both": (FULL, WINDOW),
    "state": (FULL, RecurrentState("mamba2", ARRAY), FULL),
    "entries": (WINDOW, CompressedEntries(2, 16, BF16), OpenBuffer(ARRAY, ratio=2)),
    "all": (FULL, FULL, WINDOW, RecurrentState("mamba2", ARRAY), CompressedEntries(2, 16, BF16)),
}


def random_scheduler(rng, kind):
    layers = tuple(LayerSpec(i, (part,)) for i, part in enumerate(PARTS[kind]))
    sizes = [2, 4] if kind in ("entries", "all") else [1, 2, 3, 4]
    layout = pool_layout(ModelSpec("tiny", "llama", layers, 32, 4, 100), rng.choice(sizes), rng.choice(POOLS))
    limits = Limits(rng.randint(1, 5), rng.randint(1, 12), rng.randint(8, 40))
    shared = len(layout.groups) if layout.policy == "unified" else 1
    blocks = [rng.randint(4, 16) * shared for _ in layout.buffers]
    in_flight = min(limits.max_batched_tokens, limits.max_model_len)
    rollback = rng.choice([RollbackPolicy(), RollbackPolicy(0, 4, True), RollbackPolicy(3, 2, checkpoints_kept=3)])
    return Scheduler(KVCacheManager(layout, blocks, in_flight, rollback=rollback), limits, EventLog())


def check_step(scheduler, step):
    limits = scheduler.limits
    assert 0 < step.num_tokens <= limits.max_batched_tokens and len(step.chunks) <= limits.max_num_seqs
    counts = [chunk.count for chunk in step.chunks]
    assert counts == sorted(counts, key=lambda n: n != 1), "decodes go first"
    # no slot is written by two requests, none lies in the null page
    for g, group in enumerate(scheduler.cache.groups):
        if group.retention.rule in ("state", "stride"):
            continue
        slots = [
            slot
            for chunk in step.chunks
            for slot in scheduler.cache.slot_mapping(
                chunk.request.request_id, chunk.start, chunk.start + chunk.count, g
            )
        ]
        assert len(set(slots)) == len(slots) and min(slots) >= group.block_size
    arrived = [int(r.request_id) for r in (*scheduler.running, *scheduler.waiting)]
    assert arrived == sorted(arrived), "nobody overtakes"


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("seed", range(25))
def test_every_accepted_request_finishes(kind, seed):
    rng = random.Random(seed)
    scheduler = random_scheduler(rng, kind)
    accepted, refused, work = [], 0, 0
    for arrival in range(25):
        prompt, most = rng.randint(1, 30), rng.randint(1, 15)
        request = Request(str(arrival), [1] * prompt, SamplingParams(most), stop_ids=(0,))
        try:
            scheduler.add(request, float(arrival))
            accepted.append(request)
            work += request.max_total
        except ValueError:
            refused += 1
        for _ in range(rng.randint(0, 3)):
            advance(scheduler, rng)
        if accepted and rng.random() < 0.15:
            scheduler.abort(rng.choice(accepted).request_id, float(arrival))
        if scheduler.running and rng.random() < 0.3:
            step_back(scheduler, rng)
    # each step computes a token; recomputing bounds the rest generously
    for _ in range(40 * work):
        if not scheduler.has_work:
            break
        advance(scheduler, rng)
    assert not scheduler.has_work
    assert all(r.finish_reason in ("stop", "length", "abort") for r in accepted)
    assert scheduler.cache.num_free == sum(units.num_blocks - 1 for units in scheduler.cache.unit_pools)
    assert scheduler.events.counts["finish"] == len(accepted) and scheduler.events.counts["refuse"] == refused


def step_back(scheduler, rng):
    """One running request loses some of its output, if its cache can do that; else nothing happens to it."""
    request = rng.choice(scheduler.running)
    before = (request.num_computed, len(request.tokens))
    try:
        scheduler.truncate(request.request_id, rng.randint(request.num_prompt, len(request.tokens)), 0.0)
        assert 0 <= request.num_computed < len(request.tokens)
    except ValueError:
        assert (request.num_computed, len(request.tokens)) == before
    scheduler.cache.check_invariants()


def advance(scheduler, rng):
    if scheduler.has_work:
        step = scheduler.schedule(0.0)
        check_step(scheduler, step)
        scheduler.update(step, [rng.randrange(20) for _ in step.sampling], 0.0)
        scheduler.cache.check_invariants()
