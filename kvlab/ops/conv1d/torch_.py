"""The causal convolution as one product per tap: a chunk of tokens at once, and one token of many sequences at once."""

from __future__ import annotations

import torch
from torch import Tensor


def step(x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor) -> tuple[Tensor, Tensor]:
    """(result [B, C], past afterwards) of one token `x` [B, C] for each of B sequences with `past` [B, k - 1, C]."""
    window = torch.cat((past, x.to(past.dtype)[:, None]), dim=1)
    result = (window * weight.T.to(past.dtype)).sum(1)
    return (result if bias is None else result + bias.to(past.dtype)), window[:, 1:]


def scan(x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor) -> tuple[Tensor, Tensor]:
    """(result [T, C], past afterwards) of T tokens `x` [T, C] after the inputs `past` [k - 1, C]."""
    rows, taps = torch.cat((past, x.to(past.dtype))), weight.T.to(past.dtype)
    result = taps[0] * rows[: len(x)]
    for j in range(1, len(taps)):
        result = result.addcmul_(taps[j], rows[j : j + len(x)])
    return (result if bias is None else result + bias.to(past.dtype)), rows[len(x) :]
