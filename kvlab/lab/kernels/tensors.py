"""The tensors of a configuration: without memory where it is compiled, with contents on a device where it is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

BF16 = torch.bfloat16
_devices: list[torch.device] = []


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Configurations built inside can run on `device`."""
    _devices.append(device)
    try:
        yield
    finally:
        _devices.pop()


def real() -> bool:
    """Whether tensors have contents."""
    return bool(_devices)


def numbers(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Random numbers; of bytes those below 64, which are small numbers in every format."""
    if not real():
        return torch.empty(shape, dtype=dtype, device="meta")
    if dtype.is_floating_point:
        return torch.randn(shape, device=_devices[-1]).to(dtype)
    return torch.randint(64, shape, dtype=dtype, device=_devices[-1])


def chosen(shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What `fill` gives, for tensors whose values lead somewhere: tables, lengths, pairs of pages."""
    if not real():
        return torch.empty(shape, dtype=dtype, device="meta")
    found = fill().to(dtype).to(_devices[-1]).contiguous()
    assert found.shape == shape, f"{tuple(found.shape)} is not {shape}"
    return found


def shuffled_table(sequences: int, pages: int) -> torch.Tensor:
    """int32 [sequences, pages]: every page from 1 on once, in random order."""
    shape = (sequences, pages)
    return chosen(shape, torch.int32, lambda: torch.randperm(sequences * pages).view(shape) + 1)
