"""Which differences of a pick rounding explains, and which not."""

from __future__ import annotations

import pytest
import speaking
import torch

from kvlab.engine import SamplingParams
from kvlab.engine.sampler import RowParams, probabilities, sample, uniform
from kvlab.lab.near_ties import distance, first_difference
from kvlab.lab.soak import Soak, SoakOptions


def rows(temperature: float, logits: torch.Tensor, seed: int = 5) -> RowParams:
    return RowParams.of([SamplingParams(temperature=temperature)], [seed], [3], logits)


def test_greedy_pick_is_near_a_tie_only_with_a_close_second() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0 - 4e-4, 1.9]])
    of = [distance(logits, rows(0.0, logits), token) for token in range(4)]
    assert of[1] == 0 and of[2] == pytest.approx(0.4, rel=1e-3) and of[0] > 900 and of[3] > 90


def test_drawn_pick_is_near_a_tie_only_beside_the_edge() -> None:
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(1))
    params = rows(1.0, logits)
    drawn, token = float(uniform(params.seed, params.position)[0]), int(sample(logits, params)[0])
    edges = probabilities(logits, params)[0].cumsum(0).tolist()
    expected = [max((edges[t - 1] if t else 0) - drawn, drawn - edges[t], 0) / 1e-4 for t in range(9)]
    assert [distance(logits, params, t) for t in range(9)] == pytest.approx(expected)
    assert expected[token] == 0 and sorted(expected)[1] > 1


def test_the_first_other_token_counts_and_a_shorter_answer_never_passes() -> None:
    params = SamplingParams(8, 1.0, seed=3, ignore_eos=True)
    alone = speaking.engine().generate([[4, 5, 6]], params)[0].token_ids
    assert first_difference(speaking.engine(), [4, 5, 6], params, alone) == 0
    assert first_difference(speaking.engine(), [4, 5, 6], params, alone[:5]) == float("inf")
    for i in (0, 4, 7):
        wrong = [*alone]
        wrong[i] = (alone[i] + 30) % speaking.VOCAB
        assert 1 < first_difference(speaking.engine(), [4, 5, 6], params, wrong) < float("inf")


@pytest.mark.parametrize(
    ("gap", "exact", "problems", "ties"),
    [(0.5, False, 0, 1), (0.5, True, 1, 1), (2.0, False, 1, 0), (float("nan"), False, 1, 0), (0.0, True, 0, 0)],
)
def test_soak_counts_near_ties_and_takes_none_in_fp64(monkeypatch, gap, exact, problems, ties) -> None:
    monkeypatch.setattr("kvlab.lab.soak.first_difference", lambda *_: gap)
    engine = speaking.engine()
    object.__setattr__(engine.model, "dtype", "fp64" if exact else "fp32")
    run = Soak(engine, speaking.engine, SoakOptions())
    run.sent = [
        type(
            "Sent", (), {"end": "length", "output": 3, "temperature": 0.0, "seed": 1, "prompt": [1], "token_ids": [2]}
        )()
    ]
    assert run._compare() == (1, ties) and len(run.problems) == problems


def test_an_exact_tie_is_not_taken_for_equal_tokens(monkeypatch) -> None:
    params = SamplingParams(4, 0.0, ignore_eos=True)
    alone = speaking.engine().generate([[4, 5, 6]], params)[0].token_ids
    monkeypatch.setattr("kvlab.lab.near_ties.distance", lambda *_: 0.0)
    assert 0 < first_difference(speaking.engine(), [4, 5, 6], params, [(alone[0] + 1) % speaking.VOCAB, *alone[1:]]) < 1
