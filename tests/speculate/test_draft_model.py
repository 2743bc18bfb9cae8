"""A draft model: the tokens of a run without it when greedy, the model's own distribution when not."""

import random

import pytest
import torch
from conftest_engine import Tiny
from kinds import kind

from kvlab.engine import Engine, SamplingParams
from kvlab.speculate import SpeculationOptions
from kvlab.speculate.skip import skip_layers, spread

PROMPTS = [[5, 3, 8, 1, 40], [7], list(range(20, 39)), [9, 9, 9]]


@pytest.fixture(scope="module")
def llama():
    return Tiny("full")


def engine_of(model, draft, **options):
    speculation = SpeculationOptions("draft", k=options.pop("k", 4), draft=draft, drawn=options.pop("drawn", True))
    return Engine(model, **{"num_blocks": 60, "block_size": 4, "check": True} | options, speculation=speculation)


def test_layers_skipped_share_the_weights_and_keep_less(llama):
    model = llama.model()
    half = skip_layers(model, [1])
    assert half.decoder.layers[0] is model.decoder.layers[1] and half.decoder.head is model.decoder.head
    assert half.spec.bytes_per_token * 2 == model.spec.bytes_per_token
    assert spread(30, 4) == [0, 10, 19, 29] and spread(4, 4) == [0, 1, 2, 3]
    for keep in ([], [1, 0], [2], [0, 0]):
        with pytest.raises(ValueError, match="keep"):
            skip_layers(model, keep)


@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("keep", [[0], [1], [0, 1]])
def test_greedy_tokens_are_those_without_a_draft(llama, keep, budget):
    params = SamplingParams(20)
    engine = engine_of(llama.model(), skip_layers(llama.model(), keep), max_batched_tokens=budget)
    got = [c.token_ids for c in engine.generate(PROMPTS, params)]
    assert got == [llama.reference.tokens(p, params) for p in PROMPTS]
    seen, drafter = engine.speculator.acceptance, engine.speculator.proposer
    assert seen.drafted > 0
    if keep == [0, 1]:
        # it is the model itself: every draft is right
        assert seen.accepted == seen.drafted and seen.mean_length > (2 if budget == 3 else 3)
    drafter.cache.check_invariants()
    assert drafter.cache.held_bytes == 0 and drafter.kv_bytes == engine.speculator.kv_bytes > 0


@pytest.mark.parametrize("name", ["full", "windows", "latent", "indexed"])
def test_the_model_itself_as_its_draft_is_always_right(name):
    """The draft cache follows windows, latents and index keys, over every rejection of the sampler too."""
    model = kind(name)
    params = SamplingParams(16, ignore_eos=True)
    prompt = [(7 * i + 3) % model.vocab for i in range(9)]
    engine = engine_of(model.model, model.model, num_blocks=80)
    assert engine.generate([prompt], params)[0].token_ids == model.tokens(prompt, params)
    assert engine.speculator.acceptance.accepted == engine.speculator.acceptance.drafted > 8


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules(llama, seed):
    """Small pools, preemption, aborts; the draft's own pool may be too small to draft at all."""
    rng = random.Random(seed)
    engine = engine_of(llama.model(), skip_layers(llama.model(), [seed % 2]), block_size=rng.choice([1, 3, 8]), k=3,
                       num_blocks=1 + 36 + rng.randint(0, 20), max_num_seqs=rng.randint(1, 4),
                       max_batched_tokens=rng.choice([3, 8, 64]))  # fmt: skip
    live, expected = {}, {}
    for _ in range(6):
        prompt = [rng.randrange(61) for _ in range(rng.randint(1, 24))]
        params = SamplingParams(rng.randint(1, 12))
        request_id = engine.add_request(prompt, params)
        live[request_id], expected[request_id] = engine.requests[request_id], llama.reference.tokens(prompt, params)
        for _ in range(rng.randint(0, 3)):
            engine.step()
            engine.speculator.proposer.cache.check_invariants()
    while engine.scheduler.has_work:
        engine.step()
    assert {i: r.output for i, r in live.items()} == expected
    assert engine.speculator.proposer.cache.held_bytes == engine.kv.held_bytes == 0


def test_sampled_tokens_have_the_models_distribution(llama):
    """The second and third token behind one prompt, over many seeds, against their exact joint distribution (top 3)."""
    count, prompt = 900, [5, 3, 8]
    params = [SamplingParams(3, 1.0, 3, seed=i, ignore_eos=True) for i in range(count)]
    engine = engine_of(llama.model(), skip_layers(llama.model(), [1]), num_blocks=700, max_num_seqs=300, check=False,
                       k=1)  # fmt: skip
    pairs = [tuple(c.token_ids[1:]) for c in engine.generate([prompt] * count, params)]
    exact: dict = {}
    for a, pa in top(llama, prompt):
        for b, pb in top(llama, [*prompt, a]):
            for c, pc in top(llama, [*prompt, a, b]):
                exact[b, c] = exact.get((b, c), 0) + pa * pb * pc
    assert set(pairs) <= set(exact)
    cells = {pair: p * count for pair, p in exact.items() if p * count > 5}
    statistic = sum((pairs.count(pair) - n) ** 2 / n for pair, n in cells.items())
    assert len(cells) > 5 and statistic < len(cells) + 5 * (2 * len(cells)) ** 0.5
    assert 0 < engine.speculator.acceptance.accepted < engine.speculator.acceptance.drafted


def test_chosen_drafts_give_the_sampled_tokens_of_a_run_without(llama):
    params = SamplingParams(16, 0.9, seed=4, ignore_eos=True)
    engine = engine_of(llama.model(), skip_layers(llama.model(), [0, 1]), drawn=False)
    got = engine.generate([[5, 3, 8]], params)[0].token_ids
    assert got == llama.reference.tokens([5, 3, 8], params)
    assert engine.speculator.acceptance.accepted > 0


def top(llama, ids):
    value, index = llama.reference.logits(ids)[-1].topk(3)
    return list(zip(index.tolist(), torch.softmax(value, 0).tolist(), strict=True))


def test_drafts_that_cannot_serve_are_refused(llama):
    model = llama.model()
    with pytest.raises(ValueError, match="vocabulary"):
        engine_of(model, kind("full").model)
    states = kind("states").model
    with pytest.raises(ValueError, match="keeps states"):
        engine_of(states, states)
    with pytest.raises(ValueError, match="keep_states"):
        Engine(states, num_blocks=20, speculation=SpeculationOptions(keep_states=False))
    for options in ({"method": "draft"}, {"draft": model}, {"k": 0}, {"method": "guess"}, {"cost": -1}):
        with pytest.raises(ValueError):
            SpeculationOptions(**options)
