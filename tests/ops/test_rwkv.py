"""RWKV's running average: the recurrence against its definition, extreme keys, ragged batches over poisoned pages."""

import pytest
import torch
from stateful import lengths, poisoned, run_schedule

from kvlab.ops.rwkv import reference, running_average, torch_

C = 7


def random_rows(tokens: int, seed: int, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    key, value = torch.randn(2, tokens, C, dtype=torch.float64)
    return spread * key, value


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(9)
    return torch.rand(C, dtype=torch.float64), torch.randn(C, dtype=torch.float64)


def by_definition(key, value, decay, bonus):
    """Plain sums of exponentials, token by token: what the logarithm in the state must not change."""
    outs = []
    for t in range(len(key)):
        logs = [key[s] - (t - 1 - s) * decay for s in range(t)] + [key[t] + bonus]
        shares = torch.stack(logs).exp()
        outs.append((shares * value[: t + 1]).sum(0) / shares.sum(0))
    return torch.stack(outs)


@pytest.mark.parametrize("scan", [reference.scan, torch_.scan], ids=["definition", "recurrence"])
def test_both_forms_are_the_sums_of_exponentials(scan):
    rows = random_rows(23, seed=1)
    out, _ = scan(rows, weights(), torch.zeros(3, C, dtype=torch.float64))
    torch.testing.assert_close(out, by_definition(*rows, *weights()), rtol=0, atol=1e-12)


def test_a_state_continues_where_the_tokens_before_it_ended():
    rows = random_rows(23, seed=2)
    whole, last = torch_.scan(rows, weights(), torch.zeros(3, C, dtype=torch.float64))
    for scan in (reference.scan, torch_.scan):
        _, state = scan([r[:9] for r in rows], weights(), torch.zeros(3, C, dtype=torch.float64))
        out, after = scan([r[9:] for r in rows], weights(), state)
        torch.testing.assert_close(out, whole[9:], rtol=0, atol=1e-12)
        # the logarithm is free to differ: what counts is what it multiplies
        sums, wanted = (x[:2] * x[2].exp() for x in (after, last))
        torch.testing.assert_close(sums, wanted, rtol=1e-12, atol=1e-12)


def test_keys_of_any_size_stay_finite():
    """exp(300) is beyond fp32: the state's logarithm takes it out."""
    key, value = (r.float() for r in random_rows(23, seed=3, spread=300.0))
    out, _ = torch_.scan((key, value), tuple(w.float() for w in weights()), torch.zeros(3, C))
    assert out.isfinite().all()
    assert (out.abs() <= value.abs().max()).all(), "a mean lies between what it is of"


@pytest.mark.parametrize("forced", ["torch", "reference"])
def test_a_ragged_batch_is_each_sequence_alone(forced, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", forced)
    inputs = [random_rows(n, seed=n) for n in lengths()]
    states = poisoned(3 * C, torch.float64)
    got = run_schedule(lambda rows, batch: running_average(*rows, weights(), states, batch), inputs)
    for rows, out in zip(inputs, got, strict=True):
        torch.testing.assert_close(out, by_definition(*rows, *weights()), rtol=0, atol=1e-11)
    assert states[[0, 4]].isnan().all(), "the null page and nobody's page are not touched"
