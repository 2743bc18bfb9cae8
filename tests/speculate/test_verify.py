"""The verifier: what comes out is distributed as the model says, whatever was drafted. Chains, trees, several drafts."""

import math

import pytest
import torch

from kvlab.engine.sampler import RowParams, draw, probabilities, uniform
from kvlab.schedule import SamplingParams
from kvlab.speculate.draft import Draft
from kvlab.speculate.verify import Drawn, drawing, pick, walk

VOCAB, SAMPLES = 8, 200_000
P = torch.tensor([0.30, 0.22, 0.16, 0.12, 0.09, 0.06, 0.04, 0.01], dtype=torch.float64)
DRAFTS = {
    "close": torch.tensor([0.25, 0.25, 0.15, 0.13, 0.10, 0.06, 0.05, 0.01], dtype=torch.float64),
    "far": torch.tensor([0.01, 0.02, 0.02, 0.05, 0.10, 0.20, 0.30, 0.30], dtype=torch.float64),
    "equal": P,
    "narrow": torch.tensor([0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64),
}


def chi_square(tokens, p):
    """The statistic of `tokens` [n] against `p`; under the null its mean is the number of outcomes less one."""
    expected = p * len(tokens)
    counts = torch.bincount(tokens, minlength=len(p)).double()
    assert (counts[expected == 0] == 0).all()
    alive = expected > 0
    return float(((counts - expected)[alive] ** 2 / expected[alive]).sum()), int(alive.sum()) - 1


def assert_distributed(tokens, p):
    """Chi-square below its 1 - 1e-6 quantile (Wilson-Hilferty), and total variation under 1%."""
    statistic, freedom = chi_square(tokens, p)
    a = 2 / (9 * freedom)
    assert statistic < freedom * (1 - a + 4.75 * math.sqrt(a)) ** 3
    shares = torch.bincount(tokens, minlength=len(p)).double() / len(tokens)
    assert float((shares - p).abs().sum()) / 2 < 0.01


def rows_of(params, count, logits):
    return RowParams.of([params] * count, list(range(count)), [5] * count, logits)


def drafted(q, rows, siblings):
    return torch.stack([draw(q, uniform(rows.seed, rows.position, drawing(i))) for i in range(siblings)], 1)


@pytest.mark.parametrize("siblings", [1, 2, 3])
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_drawn_drafts_leave_the_distribution_as_it_is(name, siblings, temperature):
    logits = P.log().expand(SAMPLES, VOCAB)
    rows = rows_of(SamplingParams(temperature=temperature), SAMPLES, logits)
    q = DRAFTS[name].expand(SAMPLES, VOCAB)
    token = drafted(q, rows, siblings)
    got = pick(logits, rows, Drawn(torch.arange(SAMPLES), token, q))
    target = (P.log() / temperature).softmax(-1)
    assert_distributed(got, target)
    accepted = float((got == token[:, 0]).double().mean())
    if siblings == 1:
        # the share of right drafts is what the two distributions have in common
        assert accepted == pytest.approx(float(torch.minimum(target, DRAFTS[name]).sum()), abs=0.005)
    if name == "equal" and temperature == 1.0:
        assert accepted == 1


@pytest.mark.parametrize("name", DRAFTS)
def test_filters_of_the_target_hold(name):
    logits = P.log().expand(SAMPLES, VOCAB)
    rows = rows_of(SamplingParams(temperature=1.0, top_k=3), SAMPLES, logits)
    q = DRAFTS[name].expand(SAMPLES, VOCAB)
    got = pick(logits, rows, Drawn(torch.arange(SAMPLES), drafted(q, rows, 1), q))
    assert_distributed(got, torch.cat((P[:3] / P[:3].sum(), torch.zeros(5, dtype=torch.float64))))


def test_a_chosen_draft_is_right_as_often_as_the_model_says_it():
    logits = P.log().expand(SAMPLES, VOCAB)
    got = pick(logits, rows_of(SamplingParams(temperature=1.0), SAMPLES, logits))
    assert_distributed(got, P)
    for token in range(VOCAB):
        wrong = got[got != token]
        assert float((got == token).double().mean()) == pytest.approx(float(P[token]), abs=0.005)
        rest = P.clone()
        rest[token] = 0
        assert_distributed(wrong, rest / rest.sum())


@pytest.mark.parametrize("wrong", ["another q", "kept when equal"])
def test_the_test_sees_the_known_faults(wrong):
    """DeepSpec#31: drawn from another distribution than q; jaymody#3: residual left out."""
    logits = P.log().expand(SAMPLES, VOCAB)
    rows = rows_of(SamplingParams(temperature=1.0), SAMPLES, logits)
    q = DRAFTS["far"].expand(SAMPLES, VOCAB)
    token = drafted(q, rows, 1)
    if wrong == "another q":
        claimed = (DRAFTS["far"].log() / 0.7).softmax(-1).expand(SAMPLES, VOCAB)
        got = pick(logits, rows, Drawn(torch.arange(SAMPLES), token, claimed))
    else:
        right = uniform(rows.seed, rows.position, 3) * q.gather(1, token)[:, 0] < P[token[:, 0]]
        got = torch.where(right, token[:, 0], draw(P.expand(SAMPLES, VOCAB), uniform(rows.seed, rows.position, 1)))
    with pytest.raises(AssertionError):
        assert_distributed(got, P)


def test_two_tokens_of_a_chain_have_their_joint_distribution():
    """A model whose second token depends on the first, a drafter of another opinion on both."""
    table = torch.stack([P.roll(i) for i in range(VOCAB)])
    opinion = DRAFTS["far"].expand(SAMPLES, VOCAB)
    first = rows_of(SamplingParams(temperature=1.0), SAMPLES, opinion)
    second = RowParams.of([SamplingParams(temperature=1.0)] * SAMPLES, list(range(SAMPLES)), [6] * SAMPLES, opinion)
    x, y = drafted(opinion, first, 1), drafted(opinion, second, 1)
    every = torch.arange(SAMPLES)
    got_x = pick(P.log().expand(SAMPLES, VOCAB), first, Drawn(every, x, opinion))
    # the row behind the draft counts only where the draft was right; a later step picks it anew elsewhere
    after_draft = pick(table[x[:, 0]].log(), second, Drawn(every, y, opinion))
    z = drafted(opinion, second, 1)
    anew = pick(table[got_x].log(), second, Drawn(every, z, opinion))
    got_y = torch.where(got_x == x[:, 0], after_draft, anew)
    assert_distributed(got_x * VOCAB + got_y, (P[:, None] * table).flatten())


def test_a_row_decides_the_same_alone_and_in_a_batch():
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    every = [SamplingParams(temperature=0.5 + i / 3, top_k=(0, 4)[i % 2]) for i in range(6)]
    rows = RowParams.of(every, list(range(6)), [9] * 6, logits)
    q = DRAFTS["close"].expand(6, VOCAB)
    token = drafted(q, rows, 2)
    together = pick(logits, rows, Drawn(torch.arange(6), token, q)).tolist()
    for i in range(6):
        one = rows.at(torch.tensor([i]))
        assert pick(logits[i : i + 1], one, Drawn(torch.tensor([0]), token[i : i + 1], q[i : i + 1])).tolist() == [
            together[i]
        ]


def test_the_target_is_not_changed_and_bad_logits_stay_marked():
    logits = P.log().repeat(2, 1)
    logits[1, 3] = float("nan")
    before = logits.clone()
    rows = rows_of(SamplingParams(temperature=1.0), 2, logits)
    q = DRAFTS["close"].expand(2, VOCAB)
    got = pick(logits, rows, Drawn(torch.arange(2), torch.zeros(2, 1, dtype=torch.int64), q))
    assert got[1] == -1 and got[0] >= 0
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert float(probabilities(logits[:1], rows.at(torch.tensor([0]))).sum()) == pytest.approx(1)


def test_walks():
    chain = Draft((5, 6, 7))
    assert walk(chain, [5, 6, 7, 1]) == ([0, 1, 2], 1)
    assert walk(chain, [5, 9, 7, 1]) == ([0], 9)
    assert walk(chain, [4, 6, 7, 1]) == ([], 4)
    # a draft behind a wrong one is not looked at; a shortened draft ends where it was cut
    assert walk(chain, [5, 6]) == ([0], 6)
    #        root -> 5, 6;  5 -> 7;  6 -> 7, 8;  8 (index 4) -> 9
    tree = Draft((5, 6, 7, 7, 8, 9), (-1, -1, 0, 1, 1, 4))
    assert tree.is_tree and tree.depths(6) == [1, 1, 2, 2, 2, 3]
    assert walk(tree, [6, 0, 8, 0, 0, 9, 3]) == ([1, 4, 5], 3)
    assert walk(tree, [5, 7, 0, 2, 0, 0, 0]) == ([0, 2], 2)
    assert walk(tree, [1, 7, 0, 2, 0, 0, 0]) == ([], 1)


@pytest.mark.parametrize("parents", [(0,), (-2,), (-1, 1), (-1, -1, -1)])
def test_parents_come_first(parents):
    with pytest.raises(ValueError, match="parents"):
        Draft((4, 5), parents)
