"""The recurrence of Mamba, one token after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def scan(rows: Sequence[Tensor], decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """(out [T, D], state after) of T tokens on from `state` [D, N].

    Args:
        rows: x and dt [T, D], b and c [T, N].
        decay: [D, N].
    """
    outs, decay = [], decay.to(state.dtype)
    for x, dt, b, c in zip(*(r.to(state.dtype) for r in rows), strict=True):
        state = (dt[:, None] * decay).exp() * state + torch.outer(dt * x, b)
        outs.append(state @ c)
    return torch.stack(outs), state
