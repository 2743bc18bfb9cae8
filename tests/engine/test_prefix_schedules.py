"""Prefix caching changes no token: every kind of cache, both designs, random schedules, exactly, in fp64.

Prompts come from a few families that share beginnings. Engines run with `check`: invariants after each step, NaN in
every page that nobody holds and no one can find.
"""

import random

import pytest
from kinds import KINDS, kind

from kvlab.cache import PrefixOptions
from kvlab.cache.prefix import DESIGNS, EVICTIONS
from kvlab.engine import Engine, SamplingParams
from kvlab.plan.policies import default_block_size
from kvlab.specs.pools import POOLS, pool_layout
from kvlab.specs.rollback import RollbackPolicy

PROMPT, OUTPUT = 24, 8
POLICIES = [RollbackPolicy(), RollbackPolicy(), RollbackPolicy(0, 5, True), RollbackPolicy(4, 3, checkpoints_kept=3)]


def random_options(rng, model, design):
    block_size = default_block_size(model.spec, 1) * rng.choice([1, 2, 3, 4])
    options = {
        "block_size": block_size,
        "pools": rng.choice(POOLS),
        "max_num_seqs": rng.randint(1, 5),
        "max_batched_tokens": rng.choice([3, 6, 12, 64]),
        "page_seed": rng.choice([None, 1, 2]),
        "rollback": rng.choice(POLICIES),
        "prefix": PrefixOptions(design, rng.choice(EVICTIONS), ttl=rng.choice([1e-3, 60]),
                                checkpoint_tokens=rng.choice([0, 0, 7])),
    }  # fmt: skip
    layout = pool_layout(model.spec, block_size, options["pools"])
    pages = layout.sequence_pages(PROMPT + OUTPUT, options["max_batched_tokens"], options["rollback"])
    room = rng.choice([1, 1.5, 3, 6])
    return options | {"num_blocks": tuple(2 + int(units * room) for units in layout.units(pages))}


def random_prompt(rng, vocab, known):
    """A new text, or a known one's beginning that goes on differently."""
    if known and rng.random() < 0.8:
        old = rng.choice(known)
        prompt = old[: rng.randint(1, len(old))] + [rng.randrange(vocab) for _ in range(rng.randint(0, 6))]
    else:
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(8, PROMPT))]
    known.append(prompt[:PROMPT])
    return prompt[:PROMPT]


def take(engine, got):
    for output in engine.step():
        assert output.token_id is not None, "logits are not finite"
        got[output.request_id].append(output.token_id)


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("name", KINDS)
def test_the_same_tokens_with_and_without(name, design, seed):
    rng, model = random.Random(seed * 100 + len(name) + 7 * DESIGNS.index(design)), kind(name)
    engine = Engine(model.model, check=True, **random_options(rng, model.model, design))
    wanted, got, known, aborted = {}, {}, [], set()
    for _ in range(10):
        prompt = random_prompt(rng, model.vocab, known)
        params = SamplingParams(rng.randint(1, OUTPUT), rng.choice([0.0, 0.8]), seed=rng.randrange(9), ignore_eos=True)
        request_id = engine.add_request(prompt, params, priority=rng.randint(0, 2))
        wanted[request_id], got[request_id] = (prompt, params), []
        for _ in range(rng.randint(0, 5)):
            take(engine, got)
        if rng.random() < 0.15 and engine.abort(victim := rng.choice(list(got))):
            aborted.add(victim)
    while engine.scheduler.has_work:
        take(engine, got)
    for request_id, (prompt, params) in wanted.items():
        whole = model.tokens(prompt, params)
        assert got[request_id] == (whole[: len(got[request_id])] if request_id in aborted else whole)
    use = engine.pool_use
    assert engine.kv.held_bytes == use.held == 0
    assert use.storage == engine.kv.allocated_bytes
    counters = engine.cache.prefix.counters
    assert counters.requests <= 10 and counters.hits <= counters.queries
    engine.cache.prefix.clear()
    engine.cache.check_invariants()
    assert engine.pool_use.cached == 0 and not list(engine.cache.prefix.index.entries())


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("name", KINDS)
def test_a_second_request_computes_only_what_is_new(name, design):
    """The same prompt twice: the second starts on what the first left, and says the same."""
    model = kind(name)
    size = default_block_size(model.model.spec, 3)
    engine = Engine(model.model, check=True, num_blocks=60, block_size=size, prefix=PrefixOptions(design))
    prompt, params = [(7 * i + 3) % model.vocab for i in range(32)], SamplingParams(6, ignore_eos=True)
    first, second = (engine.generate([prompt], params)[0].token_ids for _ in range(2))
    assert first == second == model.tokens(prompt, params)
    unit = engine.cache.prefix.unit
    assert [e.tokens for e in engine.events.of("hit")] == [31 // unit * unit] and unit < 31
    assert engine.cache.prefix.counters.hits == 31 // unit * unit
