"""The recurrence of Mamba with one operation per token: all else is done for a block of tokens at once.

Every value of the state fades at its own rate, so a chunk is no product of matrices as in Mamba-2. What can leave the
loop over tokens leaves it: fades and stored values before it, the product with c after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 32
"""Tokens whose fades and states exist at one time, [BLOCK, D, N] each."""


def step(rows: Sequence[Tensor], decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """(out [B, D], states after) of one token for each of B sequences with `state` [B, D, N]."""
    x, dt, b, c = (r.to(state.dtype) for r in rows)
    kept = (dt[..., None] * decay.to(state.dtype)).exp() * state
    state = kept + (dt * x)[..., None] * b[:, None]
    return (state @ c[..., None])[..., 0], state


def scan(rows: Sequence[Tensor], decay: Tensor, state: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """(out [T, D], state after) of T tokens on from `state` [D, N].

    Args:
        rows: x and dt [T, D], b and c [T, N].
        decay: [D, N].
    """
    x, dt, b, c = (r.to(state.dtype) for r in rows)
    decay, outs = decay.to(state.dtype), []
    for start in range(0, len(x), block):
        part = slice(start, start + block)
        fade = (dt[part, :, None] * decay).exp_()
        states = (dt[part] * x[part])[..., None] * b[part, None]
        for kept, stored in zip(fade, states, strict=True):
            state = stored.addcmul_(kept, state)
        outs.append((states @ c[part, :, None])[..., 0])
    return torch.cat(outs), state.clone()
