"""Linear attention, one token after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def scan(rows: Sequence[Tensor], log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """(out [T, H, Dv], state after) of T tokens on from `state` [H, Dk, Dv].

    Args:
        rows: query and key [T, H, Dk], value [T, H, Dv].
        log_decay: [H].
    """
    remains, outs = log_decay.to(state.dtype).exp()[:, None, None], []
    for query, key, value in zip(*(r.to(state.dtype) for r in rows), strict=True):
        state = remains * state + key[:, :, None] * value[:, None, :]
        outs.append(torch.einsum("hk,hkv->hv", query, state))
    return torch.stack(outs), state
