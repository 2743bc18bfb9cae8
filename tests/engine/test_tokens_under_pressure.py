"""Every kind of cache, pools too small, every policy: each request gets the tokens that it gets alone, exactly.

Victims are dropped or swapped, prefixes are saved and loaded, host memory is too small for all of it. Engines run with
`check`: invariants after each step, NaN in every page nobody holds.
"""

import random

import pytest
from kinds import KINDS, kind

from kvlab.cache.prefix import DESIGNS, EVICTIONS, PrefixOptions
from kvlab.engine import Engine, SamplingParams
from kvlab.engine.tiers import TierOptions, swap_costs
from kvlab.plan.policies import default_block_size
from kvlab.schedule import SchedulingPolicy
from kvlab.schedule.policy import ORDERS, PREEMPT, VICTIMS
from kvlab.specs.pools import POOLS, pool_layout
from kvlab.specs.rollback import RollbackPolicy

PROMPT, OUTPUT = 20, 8


def random_policy(rng, model):
    preempt = rng.choice(PREEMPT)
    # rates at which short sequences are computed again and long ones moved
    costs = swap_costs(model, 1e9, rng.choice([1e9, 1e13]), 1e-6) if preempt == "auto" or rng.random() < 0.5 else None
    return SchedulingPolicy(rng.choice(ORDERS), rng.choice(VICTIMS), preempt, costs, patience=2)


def random_prefix(rng):
    design, eviction = rng.choice(DESIGNS), rng.choice(EVICTIONS)
    return rng.choice([None, PrefixOptions(design, eviction)])


def random_engine(rng, model, **options):
    block_size = default_block_size(model.spec, 1) * rng.choice([1, 2, 4])
    pools, budget = rng.choice(POOLS), rng.choice([3, 6, 12, 64])
    rollback = rng.choice([RollbackPolicy(), RollbackPolicy(4, 3, checkpoints_kept=3)])
    layout = pool_layout(model.spec, block_size, pools)
    pages = layout.sequence_pages(PROMPT + OUTPUT, budget, rollback)
    room = rng.uniform(1, 1.7)
    units = layout.units(pages)
    host = max(layout.page_bytes(g) for g in range(len(layout.groups))) * rng.choice(
        [2, 2 * sum(pages), 9 * sum(pages)]
    )
    return Engine(
        model, check=True, block_size=block_size, pools=pools, max_num_seqs=4, max_batched_tokens=budget,
        num_blocks=tuple(2 + int(n * room) for n in units), page_seed=1, rollback=rollback,
        scheduling=random_policy(rng, model), tiers=TierOptions(host), prefix=random_prefix(rng), **options,
    )  # fmt: skip


def random_requests(rng, model, count):
    """Prompts, some of which begin with an earlier one and what came after it."""
    known: list[list[int]] = []
    for _ in range(count):
        prompt = [rng.randrange(model.vocab) for _ in range(rng.randint(1, PROMPT))]
        if known and rng.random() < 0.5:
            start = rng.choice(known)
            prompt = (start + prompt)[: rng.randint(min(len(start) + 1, PROMPT), PROMPT)]
        params = SamplingParams(rng.randint(2, OUTPUT), rng.choice([0.0, 0.8]), seed=rng.randrange(9), ignore_eos=True)
        known.append((prompt + model.tokens(prompt, params))[: PROMPT - 1])
        yield prompt, params


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_of_each_request_alone(name, seed):
    rng, model = random.Random(seed * 1000 + len(name)), kind(name)
    engine = random_engine(rng, model.model)
    wanted = {}
    for prompt, params in random_requests(rng, model, 8):
        request = engine.add_request(prompt, params, priority=rng.randrange(3))
        wanted[request] = (engine.requests[request], prompt, params)
        for _ in range(rng.randint(0, 4)):
            engine.step()
        if rng.random() < 0.1:
            engine.abort(rng.choice(list(wanted)))
        if rng.random() < 0.2:
            engine.scheduler.preempt(rng.choice(list(wanted)), 0.0)
    while engine.scheduler.has_work:
        engine.step()
    for request, prompt, params in wanted.values():
        assert request.finish_reason in ("length", "abort")
        expected = model.tokens(prompt, params)
        assert request.output == expected[: len(request.output)]
    assert engine.kv.held_bytes == 0 and not engine.tiers.in_flight


def test_the_runs_above_reach_what_they_are_about():
    """Over all kinds some sequence is dropped, some swapped out and in, some prefix saved and loaded."""
    seen = dict.fromkeys(("preempt", "swap_out", "swap_in", "save", "load"), 0)
    for name in ("full", "delta"):
        for seed in range(3):
            rng, model = random.Random(seed), kind(name)
            engine = random_engine(rng, model.model)
            for prompt, params in random_requests(rng, model, 6):
                engine.add_request(prompt, params)
                engine.step()
            while engine.scheduler.has_work:
                engine.step()
            for event in seen:
                seen[event] += engine.events.counts[event]
    assert all(seen.values()), seen
