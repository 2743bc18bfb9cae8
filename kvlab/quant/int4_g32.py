"""int4 in groups of 32 values: fp16 step and smallest value per group, as llama.cpp's q4_1: 5 bits a value."""

from __future__ import annotations

import torch

from kvlab.quant import groups

BITS, GROUP = 4, 32


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed codes uint8 [..., ceil(D / 2)], fp16 [..., 2 * ceil(D / 32)]) of `x` [..., D]; see `groups.encode`."""
    return groups.encode(x, BITS, GROUP)


def decode(packed: torch.Tensor, meta: torch.Tensor | None, width: int | None = None) -> torch.Tensor:
    """The rows in fp32."""
    assert meta is not None
    return groups.decode(packed, meta, BITS, 2 * packed.shape[-1] if width is None else width, GROUP)
