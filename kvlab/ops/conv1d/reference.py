"""The causal convolution, one token after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def scan(x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor) -> tuple[Tensor, Tensor]:
    """(result [T, C], what is past afterwards) of T tokens `x` [T, C] after the inputs `past` [k - 1, C]."""
    rows = []
    for token in x.to(past.dtype):
        window = torch.cat((past, token[None]))  # the last k inputs, oldest first
        rows.append((window * weight.T.to(past.dtype)).sum(0))
        past = window[1:]
    result = torch.stack(rows)
    return (result if bias is None else result + bias.to(past.dtype)), past
