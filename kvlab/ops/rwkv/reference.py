"""RWKV-4's running average by its definition: every token's weight for every earlier one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def scan(rows: Sequence[Tensor], weights: tuple[Tensor, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """(out [T, C], state after) of T tokens on from `state` [3, C]: numerator, denominator, their logarithm.

    Args:
        rows: key and value [T, C].
        weights: decay and bonus [C].
    """
    key, value = (r.to(state.dtype) for r in rows)
    decay, bonus = (w.to(state.dtype) for w in weights)
    outs = []
    for t in range(len(key) + 1):
        # of what was there before, and of each token s < t; the last turn is the state after all tokens
        ages = torch.arange(t - 1, -1, -1, device=key.device, dtype=key.dtype)[:, None]
        logs = torch.cat((state[2:] - t * decay + state[1:2].log(), key[:t] - ages * decay))
        stored = torch.where(state[1:2] > 0, state[:1] / state[1:2], 0)
        values = torch.cat((stored, value[:t]))
        if t < len(key):
            logs, values = torch.cat((logs, key[t : t + 1] + bonus)), torch.cat((values, value[t : t + 1]))
            outs.append((logs.softmax(0) * values).sum(0))
    highest = logs.max(0).values
    shares = (logs - highest).exp()
    return torch.stack(outs), torch.stack(((shares * values).sum(0), shares.sum(0), highest))
