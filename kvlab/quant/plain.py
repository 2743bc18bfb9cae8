"""fp64, fp32, bf16, fp16: the code is the value in that type, rounded to nearest even."""

from __future__ import annotations

from collections.abc import Callable

import torch


def encoder(dtype: torch.dtype) -> Callable[[torch.Tensor], tuple[torch.Tensor, None]]:
    """The function that stores rows as `dtype`. What fp16 cannot hold (above 65,504) becomes infinity, as in a cast."""

    def encode(x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x.to(dtype), None

    return encode


def decode(codes: torch.Tensor, scale: torch.Tensor | None = None, width: int | None = None) -> torch.Tensor:
    """The rows in fp32; fp64 stays fp64."""
    return codes if codes.dtype == torch.float64 else codes.float()
