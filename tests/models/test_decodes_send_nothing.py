"""What the host sends to the device while a step runs: nothing for decodes, short lists once for a step with chunks."""

import pytest
import torch
from recomputed import TEXT
from test_padded_rows import NAMES, model_of
from torch.utils._python_dispatch import TorchDispatchMode

from kvlab.lab.parity.paging import PagedSequences


class Sent(TorchDispatchMode):
    """Counts tensors that are made of a list; a single number travels with the operation that it is an operand of."""

    def __init__(self):
        super().__init__()
        self.lists = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.lists += "lift_fresh" in str(func) and args[0].dim() > 0
        return func(*args, **(kwargs or {}))


def sent_by(cache, work, monkeypatch):
    """Lists sent by the forward of a step of `work`."""
    decoder, sent = cache.model.decoder, Sent()
    forward = type(decoder).forward

    def watched(*inputs):
        with sent:
            return forward(decoder, *inputs)

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "forward", watched)
        cache.step(work)
    return sent.lists


def test_the_watch_sees_a_list():
    with Sent() as sent, torch.inference_mode():
        torch.tensor([1, 2])
        torch.ones(2) * torch.tensor(2.0) + torch.arange(2)
    assert sent.lists == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_decodes_sends_no_list(name, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "torch")
    cache = PagedSequences(model_of(name), 2, 20)
    cache.step({0: TEXT[:5], 1: TEXT[:3]})
    assert sent_by(cache, {0: [3], 1: [4]}, monkeypatch) == 0


def test_rows_that_close_windows_are_found_once_a_step_for_each_ratio(monkeypatch):
    """Five compressors, of entries and of index keys, in three layers; two ratios."""
    monkeypatch.setenv("KVLAB_OPS", "torch")
    cache = PagedSequences(model_of("compressed"), 2, 20)
    assert sent_by(cache, {0: TEXT[:7], 1: TEXT[:11]}, monkeypatch) == 2
