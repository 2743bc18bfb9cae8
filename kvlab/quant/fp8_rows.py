"""fp8 with one fp32 scale per token and head, chosen from the row itself: its largest value becomes the largest code."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from kvlab.quant.int8 import SMALLEST


def encoder(fp8: ModuleType) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """The encoder of rows in `fp8` (`fp8_e4m3` or `fp8_e5m2`): (codes [..., D], scale fp32 [..., 1])."""

    def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.float()
        largest = x.abs().amax(-1, keepdim=True)
        scale = (largest / fp8.MAX).clamp_min(SMALLEST)
        scale = torch.where(largest == 0, torch.ones_like(scale), scale)
        scale = torch.where(torch.isfinite(largest), scale, torch.full_like(scale, torch.nan))
        return fp8.encode(x / scale)[0], scale

    return encode


def decode(codes: torch.Tensor, scale: torch.Tensor | None, width: int | None = None) -> torch.Tensor:
    """The rows in fp32."""
    assert scale is not None
    return codes.float() * scale
