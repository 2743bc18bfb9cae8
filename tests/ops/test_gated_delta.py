"""The gated delta rule: chunks against the recurrence, ragged batches over poisoned pages against each sequence alone."""

import numpy as np
import pytest
import torch
from stateful import lengths, poisoned, run_schedule

from kvlab.ops.batch import make_batch
from kvlab.ops.gated_delta import DeltaRows, gated_delta, reference, torch_

H, HK, DK, DV = 4, 2, 5, 7


def random_rows(tokens: int, heads: int, channels: int, seed: int, strongest: float = 3.0) -> tuple[torch.Tensor, ...]:
    """query, key, value, log_decay, beta of `heads` key heads and H value heads."""
    torch.manual_seed(seed)
    query, key = torch.randn(2, tokens, heads, DK, dtype=torch.float64)
    key = torch.nn.functional.normalize(key, dim=-1)
    decay = -strongest * torch.rand(tokens, H, channels, dtype=torch.float64)
    return (
        query,
        key,
        torch.randn(tokens, H, DV, dtype=torch.float64),
        decay,
        torch.rand(tokens, H, dtype=torch.float64),
    )


def by_hand(query, key, value, log_decay, beta):
    """The recurrence in NumPy for one head, written from the paper: S (I - beta k k^T) decayed, plus beta v k^T."""
    state, outs = np.zeros((DV, DK)), []
    for q, k, v, g, b in zip(query, key, value, log_decay, beta, strict=True):
        state = state @ np.diag(np.exp(np.broadcast_to(g, DK))) @ (np.eye(DK) - b * np.outer(k, k)) + b * np.outer(v, k)
        outs.append(state @ q)
    return np.array(outs)


@pytest.mark.parametrize("channels", [1, DK])
def test_reference_is_the_papers_recurrence(channels):
    rows = random_rows(23, H, channels, seed=1)
    out, _ = reference.scan(rows, torch.zeros(H, DK, DV, dtype=torch.float64))
    for h in range(H):
        expected = by_hand(*(r[:, h].numpy() for r in rows))
        assert np.allclose(out[:, h].numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("channels", [1, DK])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 111])
def test_chunks_equal_the_recurrence(tokens, channels):
    rows = random_rows(tokens, H, channels, seed=tokens)
    state = torch.randn(H, DK, DV, dtype=torch.float64)
    (out, after), (expected, last) = torch_.scan(rows, state), reference.scan(rows, state)
    assert (out - expected).abs().max() < 1e-9
    assert (after - last).abs().max() < 1e-9


@pytest.mark.parametrize("channels", [1, DK])
def test_decays_that_underflow_stay_finite(channels):
    rows = [r.float() for r in random_rows(130, H, channels, seed=5, strongest=400.0)]
    state = torch.randn(H, DK, DV)
    (out, after), (expected, last) = torch_.scan(rows, state), reference.scan(rows, state)
    assert torch.allclose(out, expected, atol=1e-5)
    assert torch.allclose(after, last, atol=1e-5)


@pytest.mark.parametrize("forced", ["torch", "reference"])
@pytest.mark.parametrize("channels", [1, DK])
def test_a_ragged_batch_is_each_sequence_alone(channels, forced, monkeypatch):
    """Pages full of NaN, chunks and decodes mixed, padded rows; key heads serve two value heads each."""
    monkeypatch.setenv("KVLAB_OPS", forced)
    inputs = [random_rows(n, HK, channels, seed=n) for n in lengths()]
    states = poisoned(H * DK * DV, torch.float64)
    got = run_schedule(lambda rows, batch: gated_delta(DeltaRows(*rows), states, batch, scale=0.5), inputs)
    for rows, out in zip(inputs, got, strict=True):
        wide = [r.repeat_interleave(H // HK, dim=1) for r in rows[:2]]
        expected, _ = reference.scan((wide[0] * 0.5, wide[1], *rows[2:]), torch.zeros(H, DK, DV, dtype=torch.float64))
        assert (out - expected).abs().max() < 1e-10
    assert states[[0, 4]].isnan().all(), "the null page and nobody's page are not touched"


def test_a_padded_sequence_leaves_the_null_page_alone():
    rows = random_rows(3, H, 1, seed=2)
    states = poisoned(H * DK * DV, torch.float64)
    batch = make_batch([1, 1, 1], [4, 0, 0], torch.tensor([[1], [0], [0]], dtype=torch.int32), 100)
    states[1] = 1.0
    out = gated_delta(DeltaRows(*rows), states, batch, scale=1.0)
    assert out[0].isfinite().all()
    assert not out[1:].any()
    assert states[0].isnan().all()


def test_heads_must_fit():
    rows = DeltaRows(*random_rows(1, 3, 1, seed=0))
    with pytest.raises(ValueError, match="value heads 4: must be a multiple of the 3 key heads"):
        gated_delta(rows, poisoned(H * DK * DV, torch.float64), make_batch([], [], torch.zeros(0, 1), 1), scale=1.0)
