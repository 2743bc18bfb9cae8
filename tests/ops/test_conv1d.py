"""The causal convolution over state pages, against a sum written out per output value."""

import pytest
import torch
from stateful import lengths, poisoned, run_schedule
from test_device_path import NoHostReads

from kvlab.ops.batch import make_batch
from kvlab.ops.conv1d import causal_conv1d


def written_out(x, weight, bias):
    """The convolution of one whole sequence [n, C], value by value."""
    (channels, taps), out = weight.shape, torch.zeros_like(x)
    for t in range(len(x)):
        for c in range(channels):
            seen = [weight[c, j] * x[t - taps + 1 + j, c] for j in range(taps) if t - taps + 1 + j >= 0]
            out[t, c] = sum(seen) + (0 if bias is None else bias[c])
    return out


def drawn(channels, taps, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(n, channels, generator=g, dtype=torch.float64).to(dtype) for n in lengths()]
    weight = torch.randn(channels, taps, generator=g, dtype=torch.float64).to(dtype)
    return inputs, weight, torch.randn(channels, generator=g, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("form", ["reference", "torch"])
@pytest.mark.parametrize("taps", [2, 3, 4, 7])
@pytest.mark.parametrize("biased", [True, False])
def test_pieces_of_sequences_give_what_the_whole_gives(form, taps, biased, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", form)
    inputs, weight, bias = drawn(5, taps, torch.float64)
    bias = bias if biased else None
    pages = poisoned(5 * (taps - 1), torch.float64)
    got = run_schedule(lambda rows, batch: causal_conv1d(rows[0], weight, bias, pages, batch), [[x] for x in inputs])
    for x, out in zip(inputs, got, strict=True):
        torch.testing.assert_close(out, written_out(x, weight, bias), rtol=0, atol=1e-13)
    assert pages[[0, 4]].isnan().all(), "the null page and a page of no sequence are not written"


def test_a_page_holds_the_last_inputs_oldest_first():
    inputs, weight, bias = drawn(3, 4, torch.float32)
    pages = poisoned(9, torch.float32)
    run_schedule(lambda rows, batch: causal_conv1d(rows[0], weight, bias, pages, batch), [[x] for x in inputs])
    for page, x in zip((3, 1, 2), inputs, strict=True):
        torch.testing.assert_close(pages[page].view(3, 3), x[-3:], rtol=0, atol=0)


def test_a_sequence_shorter_than_the_kernel_leaves_zeros_before_its_start():
    x, weight = torch.ones(2, 3), torch.ones(3, 5)
    pages = poisoned(12, torch.float32)
    batch = make_batch([2], [2], torch.tensor([[1]], dtype=torch.int32), 100)
    causal_conv1d(x, weight, None, pages, batch)
    assert pages[1].view(4, 3).sum(1).tolist() == [0, 0, 3, 3]


def test_bf16_rounds_once_at_the_end():
    inputs, weight, bias = drawn(6, 4, torch.bfloat16)
    pages = poisoned(18, torch.bfloat16)
    got = run_schedule(lambda rows, batch: causal_conv1d(rows[0], weight, bias, pages, batch), [[x] for x in inputs])
    for x, out in zip(inputs, got, strict=True):
        wide = written_out(x.double(), weight.double(), bias.double())
        torch.testing.assert_close(out, wide.bfloat16(), rtol=2**-7, atol=1e-6)


def test_states_of_another_kernel_are_refused():
    batch = make_batch([1], [1], torch.tensor([[1]], dtype=torch.int32), 100)
    with pytest.raises(ValueError, match="states of 9 values: 3 channels and 3 taps keep 2 each"):
        causal_conv1d(torch.ones(1, 3), torch.ones(3, 3), None, poisoned(9, torch.float32), batch)


def test_a_padded_sequence_among_the_decodes_leaves_the_null_page_alone():
    """What a captured step looks like when fewer sequences run than it was captured for."""
    inputs, weight, bias = drawn(3, 4, torch.float32)
    pages = poisoned(9, torch.float32)
    pages[2] = 1.0
    batch = make_batch([1, 1], [7, 0], torch.tensor([[2], [0]], dtype=torch.int32), 100)
    with NoHostReads():
        out = causal_conv1d(inputs[0][:2], weight, bias, pages, batch)
    expected = (torch.cat((torch.ones(3, 3), inputs[0][:1])) * weight.T).sum(0) + bias
    torch.testing.assert_close(out, torch.stack((expected, torch.zeros(3))))
    assert pages[0].isnan().all() and not pages[2].isnan().any()
