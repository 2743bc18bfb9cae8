"""Linear attention: recurrent form, chunks and parallel form are one function; ragged batches over poisoned pages."""

import pytest
import torch
from stateful import lengths, poisoned, run_schedule

from kvlab.ops.linear_attention import linear_attention, reference, torch_

H, DK, DV = 3, 5, 7
DECAYS = {"none": [0.0, 0.0, 0.0], "retention": [-0.031, -0.4, -0.0157], "too strong to matter": [-900.0, -1e-9, -30.0]}


def random_rows(tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    query, key = torch.randn(2, tokens, H, DK, dtype=torch.float64)
    return query, key, torch.randn(tokens, H, DV, dtype=torch.float64)


def by_scores(query, key, value, log_decay):
    """The definition without a state: every pair of tokens, the distance's decay times the product."""
    tokens = len(query)
    out = torch.zeros(tokens, H, DV, dtype=torch.float64)
    for t in range(tokens):
        for s in range(t + 1):
            weight = (query[t] * key[s]).sum(-1) * torch.exp((t - s) * log_decay)
            out[t] += weight[:, None] * value[s]
    return out


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("chunk", [1, 4, 23, 64])
def test_recurrent_form_chunks_and_parallel_form_are_the_definition(kind, chunk):
    """Chunks of one token are the recurrence, a chunk of all of them the parallel form."""
    rows, decay = random_rows(23, seed=1), torch.tensor(DECAYS[kind], dtype=torch.float64)
    nothing = torch.zeros(H, DK, DV, dtype=torch.float64)
    expected = by_scores(*rows, decay)
    out, after = torch_.scan(rows, decay, nothing, chunk)
    recurrent, last = reference.scan(rows, decay, nothing)
    for got, wanted in ((out, expected), (recurrent, expected), (after, last)):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("forced", ["torch", "reference"])
@pytest.mark.parametrize("kind", ["none", "retention"])
def test_a_ragged_batch_is_each_sequence_alone(kind, forced, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", forced)
    decay = torch.tensor(DECAYS[kind], dtype=torch.float64)
    inputs = [random_rows(n, seed=n) for n in lengths()]
    states = poisoned(H * DK * DV, torch.float64)
    got = run_schedule(lambda rows, batch: linear_attention(tuple(rows), decay, states, batch), inputs)
    for rows, out in zip(inputs, got, strict=True):
        torch.testing.assert_close(out, by_scores(*rows, decay), rtol=0, atol=1e-10)
    assert states[[0, 4]].isnan().all(), "the null page and nobody's page are not touched"
