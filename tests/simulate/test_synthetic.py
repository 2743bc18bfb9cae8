"""Made-up traces: their distributions, their sharing, their recipes."""

from __future__ import annotations

import itertools
import statistics

import pytest

from kvlab.simulate.synthetic import Recipe, arrivals, parse_recipe, synthetic


def gaps(**changes) -> list[float]:
    times = list(itertools.islice(arrivals(Recipe(**changes)), 20_001))
    return [b - a for a, b in itertools.pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rates_mean_and_the_gammas_spread(burstiness):
    found = gaps(rate=5.0, burstiness=burstiness, seed=1)
    assert statistics.mean(found) == pytest.approx(0.2, rel=0.04)
    # a gamma distribution of shape k has a deviation of mean / sqrt(k)
    assert statistics.stdev(found) / statistics.mean(found) == pytest.approx(burstiness**-0.5, rel=0.06)


def test_lengths_have_the_asked_median_and_cap():
    trace = synthetic(Recipe(n=4001, prompt=300, output=50, spread=0.8, longest=2000, seed=3))
    assert statistics.median(r.prompt_tokens for r in trace.requests) == pytest.approx(300, rel=0.06)
    assert max(r.prompt_tokens for r in trace.requests) == 2000
    assert min(r.output_tokens for r in trace.requests) >= 1


def test_prompts_begin_with_one_of_the_prefixes_and_share_nothing_else():
    trace = synthetic(Recipe(n=200, prompt=40, prefix=70, prefixes=3, seed=0))
    # 70 tokens are 4 whole blocks of 16
    starts = {r.hash_ids[:4] for r in trace.requests}
    assert starts == {(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)}
    own = [i for r in trace.requests for i in r.hash_ids[4:]]
    assert len(own) == len(set(own)) == 200 * 3 and min(own) == 12
    assert {(r.prompt_tokens, len(r.hash_ids)) for r in trace.requests} == {(104, 7)}


def test_equal_recipes_give_equal_traces_and_other_seeds_others():
    recipe = parse_recipe("random:n=20,rate=2.5,burstiness=0.5,spread=0.3,seed=7")
    assert recipe == Recipe(n=20, rate=2.5, burstiness=0.5, spread=0.3, seed=7)
    assert synthetic(recipe) == synthetic(recipe)
    assert synthetic(recipe).requests != synthetic(parse_recipe("random:n=20,rate=2.5,burstiness=0.5,seed=8")).requests


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("poisson:n=3", "must begin with random:"),
        ("random:m=3", "recipe 'm': must be one of n, rate"),
        ("random:n=x", "recipe 'n=x': must be a whole number"),
        ("random:n=0", "n 0: must be at least 1"),
        ("random:rate=0", "rate 0.0: must be from 1e-9 to 1e9"),
        ("random:rate=1e-300", "rate 1e-300: must be from 1e-9 to 1e9"),
        ("random:spread=1000", "spread 1000.0, prefix 0: must not be negative, spread at most 10"),
        ("random:burstiness=-1", "burstiness -1.0: must be from 1e-9 to 1e9"),
        ("random:spread=-1", "spread -1.0"),
    ],
)
def test_wrong_recipe_names_its_part(text, error):
    with pytest.raises(ValueError, match=error):
        parse_recipe(text)
