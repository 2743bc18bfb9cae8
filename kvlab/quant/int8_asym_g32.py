"""int8 in groups of 32 values, asymmetric: fp16 step and smallest value per group, 9 bits a value."""

from __future__ import annotations

import torch

from kvlab.quant import groups

BITS, GROUP = 8, 32


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 [..., D], fp16 [..., 2 * ceil(D / 32)]) of `x` [..., D]; see `groups.encode`."""
    return groups.encode(x, BITS, GROUP)


def decode(codes: torch.Tensor, meta: torch.Tensor | None, width: int | None = None) -> torch.Tensor:
    """The rows in fp32."""
    assert meta is not None
    return groups.decode(codes, meta, BITS, codes.shape[-1], GROUP)
