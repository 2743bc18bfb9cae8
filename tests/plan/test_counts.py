"""Counting the work of a generation against a loop that does nothing else."""

import pytest

from kvlab.plan.counts import StepCounts, generation_counts, generation_pairs


def brute_force(prompt: int, new: int, cached: bool) -> StepCounts:
    projected = scored = copied = done = 0
    for step in range(new):
        length = prompt + step
        start = done if cached else 0
        copied += done
        for query in range(start, length):
            projected += 1
            scored += sum(1 for key in range(length) if key <= query)
        done = length
    return StepCounts(projected, scored, copied)


@pytest.mark.parametrize("prompt,new", [(1, 1), (1, 2), (5, 1), (3, 7), (16, 17)])
@pytest.mark.parametrize("cached", [True, False])
def test_counts_equal_a_loop_over_every_pair(prompt, new, cached):
    expected = brute_force(prompt, new, cached)
    counted = generation_counts(prompt, new, cached=cached, concatenates=True)
    assert (counted.projected, counted.scored) == (expected.projected, expected.scored)
    assert counted.copied == (expected.copied if cached else 0)


def test_the_guides_table_row_for_1024_tokens():
    # the guide says O(N) with a cache; the scores are a sum over the steps
    assert generation_counts(1, 1024, cached=True) == StepCounts(1024, 524_800)
    assert generation_counts(1, 1024, cached=False).projected == 524_800
    assert generation_counts(1, 1024, cached=False).scored == 179_481_600


def test_nothing_to_generate_is_refused():
    with pytest.raises(ValueError, match="new 0: both must be at least 1"):
        generation_counts(4, 0, cached=True)


@pytest.mark.parametrize("cached", [True, False])
def test_the_pairs_are_those_that_are_counted(cached):
    passes = generation_pairs(3, 4, cached=cached)
    assert [len(p) for p in passes] == ([6, 4, 5, 6] if cached else [6, 10, 15, 21])
    assert sum(map(len, passes)) == generation_counts(3, 4, cached=cached).scored
    # the last pass computes the newest query's row, with a cache nothing else
    assert {(5, key) for key in range(6)} <= set(passes[-1]) and (5, 6) not in passes[-1]
