"""Rows turned by a Hadamard matrix before they are stored: one large value becomes many middling ones.

The turn is orthogonal and its own inverse. A width that is no power of two is turned in blocks of the largest power
of two that divides it (96 = 3 x 32); an odd width is not turned at all.
"""

from __future__ import annotations

from functools import cache

import torch

from kvlab.quant import groups, int4

INT3_BITS = 3


@cache
def matrix(size: int, device: torch.device) -> torch.Tensor:
    """fp32 [size, size], size a power of two: symmetric, orthogonal, entries +-size ** -0.5 (Sylvester's).

    Always the same tensor, for reading only: a step that is captured as a graph sends nothing to its device.
    """
    with torch.inference_mode(False):
        return _matrix(size).to(device)


def _matrix(size: int) -> torch.Tensor:
    found = torch.ones(1, 1)
    while len(found) < size:
        found = torch.cat((torch.cat((found, found), 1), torch.cat((found, -found), 1)), 0)
    return found * size**-0.5


def turn(x: torch.Tensor) -> torch.Tensor:
    """`x` [..., D] turned, fp32; `turn(turn(x))` is x."""
    width = x.shape[-1]
    block = width & -width
    return (x.float().unflatten(-1, (-1, block)) @ matrix(block, x.device)).flatten(-2)


def encode_int4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`int4.encode` of the turned rows."""
    return int4.encode(turn(x))


def decode_int4(packed: torch.Tensor, meta: torch.Tensor | None, width: int | None = None) -> torch.Tensor:
    """The rows in fp32, turned back."""
    return turn(int4.decode(packed, meta, width))


def encode_int3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed codes, fp16 [..., 2]: step and smallest value) of the turned rows, 3 bits a value."""
    return groups.encode(turn(x), INT3_BITS)


def decode_int3(packed: torch.Tensor, meta: torch.Tensor | None, width: int | None = None) -> torch.Tensor:
    """The rows in fp32, turned back; `width` must be given, bytes alone do not tell it."""
    assert meta is not None and width is not None
    return turn(groups.decode(packed, meta, INT3_BITS, width))
