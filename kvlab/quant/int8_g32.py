"""int8 in groups of 32 values, symmetric: one fp16 scale per group, as llama.cpp's q8_0: 8.5 bits a value."""

from __future__ import annotations

import torch

from kvlab.quant import groups

LARGEST, GROUP = 127, 32


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8 [..., D], scale fp16 [..., ceil(D / 32)]) of `x` [..., D]; see `groups.encode_signed`."""
    codes, scale = groups.encode_signed(x, LARGEST, GROUP)
    return codes.to(torch.int8), scale


def decode(codes: torch.Tensor, scale: torch.Tensor | None, width: int | None = None) -> torch.Tensor:
    """The rows in fp32."""
    assert scale is not None
    return groups.decode_signed(codes, scale, GROUP)
