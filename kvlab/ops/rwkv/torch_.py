"""RWKV-4's running average as a recurrence: one step for many sequences, or for one sequence again and again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def step(rows: Sequence[Tensor], weights: tuple[Tensor, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """(out [B, C], states after) of one token for each of B sequences with `state` [B, 3, C].

    Args:
        rows: key and value [B, C].
        weights: decay and bonus [C].
    """
    key, value = (r.to(state.dtype) for r in rows)
    decay, bonus = (w.to(state.dtype) for w in weights)
    numerator, denominator, log = state.unbind(1)
    # a state of zeros holds nothing: its logarithm must not count
    log = torch.where(denominator > 0, log, float("-inf"))

    def merged(log: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        highest = torch.maximum(log, new)
        old, fresh = (log - highest).exp(), (new - highest).exp()
        return old * numerator + fresh * value, old * denominator + fresh, highest

    top, bottom, _ = merged(log, key + bonus)
    return top / bottom, torch.stack(merged(log - decay, key), dim=1)


def scan(rows: Sequence[Tensor], weights: tuple[Tensor, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """(out [T, C], state after) of T tokens on from `state` [3, C]."""
    outs, state = [], state[None]
    for key, value in zip(*rows, strict=True):
        out, state = step((key[None], value[None]), weights, state)
        outs.append(out)
    return torch.cat(outs), state[0]
