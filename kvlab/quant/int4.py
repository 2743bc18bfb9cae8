"""int4 per token and head: two codes a byte, one fp32 scale whose last 4 mantissa bits are the zero point.

value = scale * (code - zero), codes 0 .. 15. The zero point is a whole code, so zero is stored exactly, and it lies
where the scale loses nothing that counts: rows are encoded by the scale as it is stored. Source of that place: vLLM
0.33, int4 per token-head. `int4_sym` is the same with zero 8 and codes 1 .. 15.
"""

from __future__ import annotations

import torch

from kvlab.quant.int8 import SMALLEST
from kvlab.quant.packing import pack, unpack

BITS, ZERO_MASK = 4, 15


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed codes uint8 [..., ceil(D / 2)], scale fp32 [..., 1]) of `x` [..., D]; error at most scale / 2.

    A row with NaN or infinity gets scale NaN.
    """
    x = x.float()
    low, high = x.amin(-1, keepdim=True).clamp_max(0), x.amax(-1, keepdim=True).clamp_min(0)
    step = (high - low) / 15
    zero = torch.round(-low / step).nan_to_num(0.0).clamp(0, 15)
    return _codes(x, step, zero, (0, 15))


def encode_symmetric(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `encode`, with as many steps below zero as above: scale = max|x| / 7."""
    x = x.float()
    step = x.abs().amax(-1, keepdim=True) / 7
    return _codes(x, step, torch.full_like(step, 8), (1, 15))


def _codes(
    x: torch.Tensor, step: torch.Tensor, zero: torch.Tensor, bounds: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.where(step == 0, torch.ones_like(step), step.clamp_min(SMALLEST))
    scale = torch.where(torch.isfinite(step), scale, torch.full_like(scale, torch.nan))
    scale = ((scale.view(torch.int32) & ~ZERO_MASK) | zero.to(torch.int32)).view(torch.float32)
    codes = (torch.round(x / scale) + zero).nan_to_num(0.0).clamp(*bounds)
    return pack(codes.to(torch.uint8), BITS), scale


def decode(packed: torch.Tensor, scale: torch.Tensor | None, width: int | None = None) -> torch.Tensor:
    """The rows in fp32, `width` values each (all that the bytes hold when None)."""
    assert scale is not None
    zero = (scale.view(torch.int32) & ZERO_MASK).float()
    codes = unpack(packed, BITS, 2 * packed.shape[-1] if width is None else width)
    return (codes.float() - zero) * scale
