"""The recurrence of Mamba-2, one token after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def scan(rows: Sequence[Tensor], decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """(out [T, H, P], state after) of T tokens on from `state` [H, P, N].

    Args:
        rows: x [T, H, P], dt [T, H], b and c [T, G, N].
        decay: [H].
    """
    outs, decay = [], decay.to(state.dtype)
    for x, dt, b, c in zip(*(r.to(state.dtype) for r in rows), strict=True):
        b, c = (v.repeat_interleave(len(x) // len(v), dim=0) for v in (b, c))  # [H, N]
        stored = torch.einsum("hp,hn->hpn", dt[:, None] * x, b)
        state = (dt * decay).exp()[:, None, None] * state + stored
        outs.append(torch.einsum("hpn,hn->hp", state, c))
    return torch.stack(outs), state
