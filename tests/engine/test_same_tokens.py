"""The same tokens whatever the page size, page order, batch mates, chunking and preemption: exactly, in fp64.

Every engine here runs with `check`: invariants after each step, NaN in every page nobody holds, at start and after
each release. One read of a slot that is not the request's own makes its logits NaN and ends it with an error.
"""

import random

import pytest

from kvlab.engine import Engine, SamplingParams


def generate(tiny, prompts, params, **options):
    """(token ids of each prompt, engine) under `options`."""
    engine = Engine(tiny.model(), **{"num_blocks": 40, "check": True} | options)
    done = engine.generate(prompts, params)
    assert [c.error for c in done] == [""] * len(prompts)
    assert engine.kv.held_bytes == engine.kv.used_bytes == 0
    return [c.token_ids for c in done], engine


def test_one_prompt_equals_recomputing_everything(every_tiny):
    params = SamplingParams(20)
    expected = every_tiny.reference.tokens([5, 3, 8, 1, 40], params)
    assert len(set(expected)) > 5, "a model that repeats itself tests nothing"
    assert generate(every_tiny, [[5, 3, 8, 1, 40]], params)[0] == [expected]


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 16, 64])
def test_page_size(every_tiny, block_size):
    prompts, params = [[5, 3, 8, 1, 40], [7], list(range(20, 39))], SamplingParams(12)
    expected = [every_tiny.reference.tokens(p, params) for p in prompts]
    assert generate(every_tiny, prompts, params, block_size=block_size, num_blocks=100)[0] == expected


@pytest.mark.parametrize("page_seed", range(3))
def test_page_order(every_tiny, page_seed):
    prompts, params = [[5, 3, 8, 1, 40], [7], list(range(20, 39))], SamplingParams(12)
    expected = [every_tiny.reference.tokens(p, params) for p in prompts]
    tokens, engine = generate(every_tiny, prompts, params, block_size=3, page_seed=page_seed)
    assert tokens == expected
    assert list(engine.cache.pools[0].free_blocks()) != sorted(engine.cache.pools[0].free_blocks())


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 30])
def test_chunking(every_tiny, budget):
    prompts, params = [[5, 3, 8, 1, 40], [7], list(range(20, 39))], SamplingParams(12)
    expected = [every_tiny.reference.tokens(p, params) for p in prompts]
    assert generate(every_tiny, prompts, params, block_size=4, max_batched_tokens=budget)[0] == expected


def test_preemption_recomputes_to_the_same_tokens(every_tiny):
    prompts, params = [[5, 3, 8, 1, 40], [7, 7], [9, 1], list(range(20, 29))], SamplingParams(16)
    expected = [every_tiny.reference.tokens(p, params) for p in prompts]
    # room for one request at its longest, and little more: a window of 7 with 8 tokens in flight takes 8 pages
    blocks = {"full": 14, "window": 9, "both": (14, 9)}[every_tiny.kind]
    tokens, engine = generate(every_tiny, prompts, params, block_size=2, num_blocks=blocks, max_batched_tokens=8)
    assert tokens == expected
    assert engine.events.counts["preempt"] > 0


@pytest.mark.parametrize("extra", ["W-1", "W", "W+1", "2W", "2W+1"])
@pytest.mark.parametrize("block_size", [1, 3, 7, 8])
def test_around_the_window(tiny, extra, block_size):
    mistral = tiny("window")
    n = {"W-1": 6, "W": 7, "W+1": 8, "2W": 14, "2W+1": 15}[extra]
    assert mistral.window == 7
    prompt, params = [(7 * i + 3) % 61 for i in range(n)], SamplingParams(3)
    expected = mistral.reference.tokens(prompt, params)
    assert generate(mistral, [prompt], params, block_size=block_size)[0] == [expected]


def test_a_long_text_fits_a_small_pool_when_all_layers_have_windows(tiny):
    mistral = tiny("window")
    prompt, params = [(5 * i + 1) % 61 for i in range(50)], SamplingParams(30)
    expected = mistral.reference.tokens(prompt, params)
    tokens, engine = generate(mistral, [prompt], params, block_size=2, num_blocks=8, max_batched_tokens=4)
    assert tokens == [expected]
    # 6 older tokens and 4 new ones, in pages of two; each chunk's window starts at a page's first token
    assert engine.kv.peak_held_bytes == 5 * engine.groups[0].block_bytes


def test_a_request_joins_and_leaves_without_the_others_noticing(tiny):
    llama, params = tiny("full"), SamplingParams(10)
    engine = Engine(llama.model(), num_blocks=40, block_size=4, check=True)
    got = {engine.add_request([5, 3], params): [], engine.add_request([9, 1, 2], params): []}
    first, second = got
    for step in range(30):
        if step == 3:
            third = engine.add_request([30, 31, 32, 33], params)
            got[third] = []
        if step == 5:
            assert engine.abort(second)
        for output in engine.step():
            got[output.request_id].append(output.token_id)
    assert got[first] == llama.reference.tokens([5, 3], params)
    assert got[third] == llama.reference.tokens([30, 31, 32, 33], params)
    assert got[second] == llama.reference.tokens([9, 1, 2], params)[:5]


@pytest.mark.parametrize("seed", range(12))
def test_random_schedules(every_tiny, seed):
    """Arrivals, aborts, page sizes, budgets, tiny pools, shuffled pages, samplers: each request gets its own tokens."""
    rng = random.Random(seed)
    options = {
        "block_size": rng.choice([1, 2, 3, 4, 8]),
        "max_num_seqs": rng.randint(1, 5),
        "max_batched_tokens": rng.choice([1, 3, 6, 12, 64]),
        "page_seed": rng.choice([None, 1, 2]),
        "pad_to": rng.choice([1, 4]),
    }
    # what the longest request needs, and up to its double
    longest = 24 + 12
    options["num_blocks"] = 1 + int(longest // options["block_size"] * rng.uniform(1.3, 2)) + 6
    engine = Engine(every_tiny.model(), check=True, **options)
    expected, got, aborted = {}, {}, set()
    for _ in range(8):
        prompt = [rng.randrange(61) for _ in range(rng.randint(1, 24))]
        params = SamplingParams(rng.randint(1, 12), rng.choice([0.0, 0.8]), rng.choice([0, 5]), rng.choice([1.0, 0.9]),
                                seed=rng.randrange(100))  # fmt: skip
        request_id = engine.add_request(prompt, params)
        expected[request_id], got[request_id] = every_tiny.reference.tokens(prompt, params), []
        for _ in range(rng.randint(0, 4)):
            take(engine, got)
        if rng.random() < 0.15:
            victim = rng.choice(list(got))
            if engine.abort(victim):
                aborted.add(victim)
    while engine.scheduler.has_work:
        take(engine, got)
    for request_id, tokens in got.items():
        whole = expected[request_id]
        assert tokens == (whole[: len(tokens)] if request_id in aborted else whole), options
    assert engine.kv.held_bytes == 0


def take(engine, got):
    for output in engine.step():
        got[output.request_id].append(output.token_id)
