"""int8: symmetric, one fp32 scale per token and head."""

from __future__ import annotations

import torch

SMALLEST = 2.0**-126  # smallest normal fp32: a smaller scale would make the quotient overflow


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8 [..., D], scale fp32 [..., 1]) with scale = max|x| / 127; error at most scale / 2.

    A row of zeros gets scale 1. A row with NaN or infinity gets codes 0 and scale NaN, so that it decodes to
    NaN and not to a plausible number.
    """
    x = x.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    scale = (largest / 127).clamp_min(SMALLEST)
    scale = torch.where(largest == 0, torch.ones_like(scale), scale)
    scale = torch.where(torch.isfinite(largest), scale, torch.full_like(scale, torch.nan))
    codes = torch.round(x / scale).nan_to_num(0.0).clamp(-127, 127)
    return codes.to(torch.int8), scale


def decode(codes: torch.Tensor, scale: torch.Tensor | None, width: int | None = None) -> torch.Tensor:
    """The rows in fp32."""
    assert scale is not None
    return codes.float() * scale
