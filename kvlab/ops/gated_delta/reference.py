"""The gated delta rule, one token after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def scan(rows: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """(out [T, H, Dv], state after) of T tokens on from `state` [H, Dk, Dv].

    Args:
        rows: query and key [T, H, Dk], value [T, H, Dv], log_decay [T, H, 1] or [T, H, Dk], beta [T, H].
    """
    outs = []
    for query, key, value, log_decay, beta in zip(*(r.to(state.dtype) for r in rows), strict=True):
        state = log_decay.exp()[:, :, None] * state
        stored = torch.einsum("hk,hkv->hv", key, state)
        state = state + key[:, :, None] * (beta[:, None] * (value - stored))[:, None, :]
        outs.append(torch.einsum("hk,hkv->hv", query, state))
    return torch.stack(outs), state
