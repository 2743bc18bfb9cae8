"""What the number of drafts depends on: the share right among those looked at, and what a step with drafts costs."""

from __future__ import annotations

import itertools

import pytest
from conftest_engine import Tiny

from kvlab.book.results import load_result
from kvlab.engine import Engine, SamplingParams
from kvlab.lab.speculation import METHODS, fitted, pages_by_step
from kvlab.speculate import Draft, SpeculationOptions
from kvlab.speculate.adapt import Acceptance, best_count, expected_tokens, fit_cost, rate_of, speed
from kvlab.speculate.draft import Stateless


def by_outcomes(rate: float, count: int) -> float:
    """Tokens of a step, over every way in which its drafts can be right or wrong."""
    total = 0.0
    for outcome in itertools.product((True, False), repeat=count):
        chance = 1.0
        for right in outcome:
            chance *= rate if right else 1 - rate
        total += chance * (1 + len(list(itertools.takewhile(bool, outcome))))
    return total


@pytest.mark.parametrize("rate", [0.0, 0.25, 0.82, 1.0])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_tokens_of_a_step_and_back(rate, count):
    assert expected_tokens(rate, count) == pytest.approx(by_outcomes(rate, count))
    assert rate_of(expected_tokens(rate, count), count) == pytest.approx(rate, abs=1e-9)
    for tokens, k in ((0.9, count), (count + 1.1, count), (1, 0)):
        with pytest.raises(ValueError, match=f"tokens {tokens} at count {k}"):
            rate_of(tokens, k)


def test_a_draft_behind_a_wrong_one_is_not_looked_at():
    seen = Acceptance()
    for accepted in (0, 2, 4):
        seen.note(4, accepted)
    assert (seen.drafted, seen.accepted, seen.looked_at) == (12, 6, 1 + 3 + 4)
    assert (seen.right, Acceptance().right) == (6 / 8, 0.0)


def test_a_fixed_cost_wants_many_drafts_or_none():
    assert [best_count(0.5, 8, 0.1, fixed) for fixed in (0, 0.3, 0.7)] == [2, 3, 0]
    assert [best_count(0.8, 8, 0.02, fixed) for fixed in (0, 0.7, 4)] == [8, 8, 0]
    for rate, cost, fixed in itertools.product((0.1, 0.6, 0.9), (0.0, 0.3), (0.0, 0.7)):
        speeds = [speed(rate, k, cost, fixed) for k in range(7)]
        assert speeds[0] == 1 and best_count(rate, 6, cost, fixed) == speeds.index(max(speeds))


def test_a_line_gives_its_two_costs():
    assert fit_cost([1, 2, 4, 8], [1.72, 1.74, 1.78, 1.86]) == pytest.approx((0.02, 0.7))
    with pytest.raises(ValueError, match="two different"):
        fit_cost([4, 4], [1, 2])
    for name in ("cost", "fixed_cost"):
        with pytest.raises(ValueError, match=f"^{name} -0.1"):
            SpeculationOptions(**{name: -0.1})


def test_the_two_numbers_name_a_count_that_the_record_bears_out():
    """In every chain that is recorded: drafts pay where they say so, and at their count the speed is near the best."""
    settings = load_result("speculation")["settings"]
    for method, text in itertools.product(METHODS, ("predictable", "questions", "unpredictable")):
        if "tree" in method:
            continue
        found = fitted(settings, method, text)
        speeds = {s["k"]: s["time_ratio"] for s in settings if (s["method"], s["text"]) == (method, text)} | {0: 1.0}
        assert bool(found.best) == bool(found.fastest), (method, text, found)
        assert speeds[found.fastest] == max(speeds.values()), (method, text, found)
        near = min(found.ks, key=lambda k: abs(k - found.best)) if found.best else 0
        assert speeds[near] > 0.85 * max(speeds.values()), (method, text, found)
    with pytest.raises(ValueError, match="two different"):
        fitted(settings, "none", "questions")


def test_pages_of_a_step_are_those_of_its_tokens_and_drafts():
    """Within a step with k drafts the pages of k more tokens, after it those of the tokens known by then."""
    tiny, k, page = Tiny("full"), 6, 4
    params = SamplingParams(9, ignore_eos=True)
    prompt = [(5 * i + 2) % 61 for i in range(10)]

    def steps(speculation):
        return pages_by_step(
            Engine(tiny.model(), num_blocks=40, block_size=page, speculation=speculation), prompt, params
        )

    plain = steps(None)
    assert plain == [(n, -(-n // page), -(-n // page) if n < 18 else 0) for n in range(11, 19)]
    [answer] = Engine(tiny.model(), num_blocks=40, block_size=page).generate([prompt], params)
    wrong = SpeculationOptions(lambda engine: Wrong([*prompt, *answer.token_ids]), k=k)
    # all drafts are wrong, and at the end there is room for fewer: the last token is never computed
    expected = [(n, -(-min(n + k, 18) // page), -(-(n + 1) // page) if n < 18 else 0) for n in range(11, 19)]
    assert steps(wrong) == expected


class Wrong(Stateless):
    """Drafts what does not follow."""

    def __init__(self, tokens):
        self.tokens = tokens

    def propose(self, requests, counts):
        return [Draft(((self.tokens[len(r.tokens)] + 1) % 61,) * n) for r, n in zip(requests, counts, strict=True)]
