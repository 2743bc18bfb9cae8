"""The sampler against plain Python: random bits, filters, distributions, and rows that do not know of each other."""

import math
from collections import Counter

import pytest
import torch

from kvlab.engine.sampler import RowParams, sample, uniform
from kvlab.schedule import SamplingParams

MASK = 2**64 - 1


def splitmix(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def plain_uniform(seed, position):
    return (splitmix((splitmix(seed) + position * 0x9E3779B97F4A7C15) & MASK) >> 11) / 2**53


def plain_sample(logits, params, position):
    """One row in plain Python: sort, cut, then walk the vocabulary."""
    if params.temperature == 0:
        return max(range(len(logits)), key=lambda i: (logits[i], -i))
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[: params.top_k or None]
    top = max(logits)
    weight = {i: math.exp((logits[i] - top) / params.temperature) for i in order}
    total, kept, before = sum(weight.values()), [], 0.0
    for i in order:
        if params.top_p == 1 or not kept or before / total < params.top_p:
            kept.append(i)
        before += weight[i]
    left = plain_uniform(params.seed, position) * sum(weight[i] for i in kept)
    for i in sorted(kept):
        left -= weight[i]
        if left < 0:
            return i
    raise AssertionError("the kept probabilities do not reach their own sum")


def rows_of(params, positions, logits):
    return RowParams.of(params, [p.seed or 0 for p in params], positions, logits)


def test_random_bits_are_those_of_the_definition():
    seeds, positions = [0, 1, 2**63 - 1, 12345], [0, 7, 2**31, 8191]
    got = uniform(torch.tensor(seeds), torch.tensor(positions)).tolist()
    assert got == [plain_uniform(s, p) for s, p in zip(seeds, positions, strict=True)]
    assert all(0 <= u < 1 for u in got)


@pytest.mark.parametrize("neighbour", [0.0, 0.7])
@pytest.mark.parametrize("params", [
    SamplingParams(seed=3), SamplingParams(temperature=0.8, seed=3), SamplingParams(temperature=1.7, top_k=4, seed=9),
    SamplingParams(temperature=1.0, top_p=0.6, seed=4), SamplingParams(temperature=2.5, top_k=9, top_p=0.5, seed=5),
    SamplingParams(temperature=1.0, top_k=1, seed=6), SamplingParams(temperature=1.0, top_p=1e-9, seed=6),
    SamplingParams(temperature=1.0, top_k=500, seed=7),
], ids=str)  # fmt: skip
def test_each_row_is_what_plain_python_picks(params, neighbour):
    logits = torch.randn(60, 23, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
    # every second row belongs to a request with other settings
    every = [params if i % 2 else SamplingParams(temperature=neighbour, top_p=0.9, seed=i) for i in range(60)]
    got = sample(logits, rows_of(every, list(range(60)), logits)).tolist()
    assert got == [plain_sample(row.tolist(), p, i) for i, (row, p) in enumerate(zip(logits, every, strict=True))]


def test_a_row_alone_and_in_a_batch_are_the_same():
    """The unfiltered rows too, beside rows that are: they share one sort."""
    logits = torch.randn(7, 1000, generator=torch.Generator().manual_seed(2)) * 3
    every = [SamplingParams(temperature=0.5 + i / 4, top_k=(0, 50)[i % 2], seed=i) for i in range(7)]
    together = sample(logits, rows_of(every, list(range(7)), logits)).tolist()
    alone = [int(sample(logits[i : i + 1], rows_of([every[i]], [i], logits[i : i + 1]))) for i in range(7)]
    assert together == alone


def test_frequencies_are_the_probabilities():
    n = 40_000
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    logits = probabilities.log().expand(n, 5)
    every = [SamplingParams(temperature=1.0, seed=11)] * n
    counts = Counter(sample(logits, rows_of(every, list(range(n)), logits)).tolist())
    distance = sum(abs(counts[i] / n - float(p)) for i, p in enumerate(probabilities)) / 2
    assert distance < 0.01  # the mean over such draws is 0.003


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_marked_and_spoils_no_other(bad, temperature):
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(3))
    every = [SamplingParams(temperature=temperature, seed=1)] * 3
    good = sample(logits, rows_of(every, [4, 5, 6], logits)).tolist()
    broken = logits.clone()
    broken[1, 4] = bad
    assert sample(broken, rows_of(every, [4, 5, 6], broken)).tolist() == [good[0], -1, good[2]]
    broken[1] = -float("inf")
    assert sample(broken, rows_of(every, [4, 5, 6], broken)).tolist() == [good[0], -1, good[2]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_of_every_width_are_taken(dtype):
    logits = torch.zeros(2, 70_000, dtype=dtype)
    logits[:, 66_666] = 30
    every = [SamplingParams(), SamplingParams(temperature=0.5, seed=1)]
    assert sample(logits, rows_of(every, [0, 0], logits)).tolist() == [66_666, 66_666]
