"""Encoding and decoding send nothing to the device of the rows: what runs again and again can be captured as a graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvlab.quant import get_codec, hadamard, row_formats
from kvlab.quant.closed import codec_of
from kvlab.specs.formats import FORMATS, get_format
from kvlab.specs.grouped import grouped
from kvlab.specs.parts import Attention

DEVICE = torch.device("meta")  # stands for a GPU: what comes from the CPU would be sent


class NoCopies(TorchDispatchMode):
    """Raises where an operation for the device takes a CPU tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()]
        if any(x.device != DEVICE for x in found):
            raise AssertionError(f"sent to the device: {func}")
        return func(*args, **(kwargs or {}))


class NoLists(TorchFunctionMode):
    """Raises where a list becomes a tensor."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.tensor, torch.as_tensor) and isinstance(args[0], (list, tuple)):
            raise AssertionError("sent to the device: a list")
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_sent() -> Iterator[None]:
    with NoLists(), NoCopies():
        yield


def test_the_watch_sees_a_list_and_a_copy() -> None:
    with pytest.raises(AssertionError, match="sent"), nothing_sent():
        torch.tensor([1.0, 2.0], device=DEVICE)
    matrix = torch.ones(2, 2)
    with pytest.raises(AssertionError, match="sent"), nothing_sent():
        matrix.to(DEVICE)
    with nothing_sent():
        torch.empty(3, device=DEVICE) * 2.0 + torch.arange(3, device=DEVICE)


@pytest.mark.parametrize("name", row_formats())
def test_rows_are_coded_where_they_are(name: str) -> None:
    rows, codec = torch.empty(2, 3, 96, device=DEVICE), get_codec(name)
    codec.decode(*codec.encode(rows), 96)  # the first call may fetch constants
    with nothing_sent():
        back = codec.decode(*codec.encode(rows), 96)
    assert back.shape == rows.shape and back.device == DEVICE


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.group_tokens])
def test_groups_of_tokens_are_coded_where_they_are(name: str) -> None:
    part, _ = grouped(Attention(3, 64, 64, get_format("bf16")), 0, get_format(name))
    rows = torch.empty(2, 3, part.format.group_tokens, 64, device=DEVICE)
    codec_of(part).decode(codec_of(part).encode(rows, rows, part), part)
    with nothing_sent():
        key, value = codec_of(part).decode(codec_of(part).encode(rows, rows, part), part)
    assert key.shape == value.shape == rows.shape


def test_constants_of_a_step_can_be_used_where_gradients_flow() -> None:
    """Inference mode's own tensors could not."""
    hadamard.matrix.cache_clear()
    with torch.inference_mode():
        hadamard.turn(torch.randn(2, 32))
    rows = torch.randn(2, 32, requires_grad=True)
    hadamard.turn(rows).square().sum().backward()
    torch.testing.assert_close(rows.grad, 2 * rows.detach())
