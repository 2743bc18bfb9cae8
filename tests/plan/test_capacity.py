"""How many fit, and how long they may be: integers against brute force."""

import random

import pytest

from kvlab.plan.capacity import MemoryBudget, max_concurrent, tokens_that_fit, usable_bytes
from kvlab.plan.plan import make_plan
from kvlab.plan.policies import PolicySettings, bytes_function, ideal_bytes, sequence_bytes
from kvlab.specs.formats import get_format
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import Attention, CompressedEntries, RecurrentState, SlidingWindow, StateArray

BF16 = get_format("bf16")


def model_of(*parts):
    return ModelSpec("m", "m", tuple(LayerSpec(i, (p,)) for i, p in enumerate(parts)), 512, 8, 1000)


FULL = Attention(1, 8, 8, BF16)  # 32 bytes a token


def sliding(size):
    return SlidingWindow(1, 8, 8, BF16, window=size)


MIXES = {
    "full and windows": model_of(FULL, sliding(7), sliding(20)),
    "windows and a state": model_of(sliding(5), RecurrentState("x", (StateArray("s", ((10, 1),), 1, BF16),)), FULL),
    "entries": model_of(CompressedEntries(4, 16, BF16), sliding(8)),
}


@pytest.mark.parametrize("name", MIXES)
def test_the_inverse_of_bytes_is_the_longest_length_found_by_trying_all(name):
    # aiconfigurator#1201: the bytes at length 1 were taken for a rate
    sizes = {n: ideal_bytes(MIXES[name], n) for n in range(1, 120)}
    for budget in range(0, 2500, 13):
        want = max((n for n, size in sizes.items() if size <= budget), default=0)
        assert tokens_that_fit(sizes.__getitem__, budget, limit=119) == want, budget


@pytest.mark.parametrize("seed", [0])
def test_the_inverse_holds_for_pages_too(seed):
    settings = PolicySettings("paged", block_size=4, in_flight=8)
    sizes = [sequence_bytes(MIXES["full and windows"], n, settings).total for n in range(1, 200)]
    assert sizes == sorted(sizes)
    rng = random.Random(5 + seed)
    for budget in (rng.randrange(sizes[-1]) for _ in range(50)):
        want = sum(size <= budget for size in sizes)
        assert tokens_that_fit(lambda n: sizes[n - 1], budget, limit=199) == want


@pytest.mark.parametrize("policy", ["ideal", "paged", "vllm"])
def test_the_fast_form_of_bytes_is_the_same_function(policy):
    model = model_of(FULL, sliding(7), FULL, sliding(20), sliding(7))
    settings = PolicySettings(policy, block_size=4, in_flight=5, cp=2)
    fast = bytes_function(model, settings)
    for tokens in range(1, 100):
        assert fast(tokens) == sequence_bytes(model, tokens, settings).total


def test_nothing_fits_a_budget_below_one_token_or_below_zero():
    assert tokens_that_fit(lambda n: 10 * n, 9) == 0
    assert tokens_that_fit(lambda n: 0, -1) == 0
    assert tokens_that_fit(lambda n: 10 * n, 10) == 1


def test_an_all_window_model_fits_by_its_window_not_by_its_length():
    # vllm#19029: concurrency counted sliding layers as if they were full
    model = model_of(*[SlidingWindow(8, 128, 128, BF16, window=1024)] * 10)
    long, longer = (make_plan(model, context=n, gpu="l4", reserve=0, policy="vllm") for n in (8192, 131072))
    blocks = -(-(1023 + 2048) // 16) + 1
    assert long.per_gpu().total == longer.per_gpu().total == 10 * blocks * 16 * 4096
    assert long.max_concurrent() == longer.max_concurrent() > 0
    assert longer.longest_context is None  # any length
    ideal = make_plan(model, context=131072, gpu="l4", reserve=0)
    assert ideal.per_gpu().total == 10 * 1024 * 4096


def test_budget_and_fraction_are_exact():
    assert usable_bytes(10**18 + 7, 0.9) == (9 * (10**18 + 7)) // 10
    assert MemoryBudget(100, 90, 60, 10).free_bytes == 20
    assert MemoryBudget(100, 90, 85, 10).free_bytes == -5
    with pytest.raises(ValueError, match=r"gpu_util 1\.5"):
        usable_bytes(100, 1.5)


@pytest.mark.parametrize(
    ("free", "one", "overhead", "want"),
    [(100, 30, 0, 3), (100, 30, 11, 2), (-5, 30, 0, 0), (29, 30, 0, 0), (50, 0, 0, 0)],
)
def test_whole_sequences_only(free, one, overhead, want):
    assert max_concurrent(free, one, overhead) == want
