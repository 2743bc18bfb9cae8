"""int8, asymmetric: 256 steps between a row's smallest and largest value, both ends fp32."""

from __future__ import annotations

import torch

from kvlab.quant.int8 import SMALLEST


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 [..., D], fp32 [..., 2]: step and smallest value); error at most step / 2. NaN as in `int8`."""
    x = x.float()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = ((high - low) / 255).clamp_min(SMALLEST)
    step = torch.where(torch.isfinite(high - low), step, torch.full_like(step, torch.nan))
    codes = torch.round((x - low) / step).nan_to_num(0.0).clamp(0, 255)
    return codes.to(torch.uint8), torch.cat((step, low), dim=-1)


def decode(codes: torch.Tensor, meta: torch.Tensor | None, width: int | None = None) -> torch.Tensor:
    """The rows in fp32."""
    assert meta is not None
    return codes.float() * meta[..., :1] + meta[..., 1:]
