"""int4 in groups of 32 values, symmetric: one fp16 scale per group, 4.5 bits a value.

Codes are 1 .. 15 and count from 8, as many steps below zero as above. llama.cpp's q4_0 takes the same bytes and uses code
0 too: its scale has the sign that puts a group's largest value there.
"""

from __future__ import annotations

import torch

from kvlab.quant import groups
from kvlab.quant.packing import pack, unpack

BITS, LARGEST, ZERO, GROUP = 4, 7, 8, 32


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed codes uint8 [..., ceil(D / 2)], scale fp16 [..., ceil(D / 32)]) of `x` [..., D]; see
    `groups.encode_signed`."""
    codes, scale = groups.encode_signed(x, LARGEST, GROUP)
    return pack((codes + ZERO).to(torch.uint8), BITS), scale


def decode(packed: torch.Tensor, scale: torch.Tensor | None, width: int | None = None) -> torch.Tensor:
    """The rows in fp32, `width` values each (all that the bytes hold when None)."""
    assert scale is not None
    codes = unpack(packed, BITS, 2 * packed.shape[-1] if width is None else width)
    return groups.decode_signed(codes.float() - ZERO, scale, GROUP)
