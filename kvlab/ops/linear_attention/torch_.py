"""Linear attention with few, large products: chunks of tokens in the parallel form, and one token of many sequences.

Within a chunk a token reads the tokens before it by scores, [C, C] per head, and everything before the chunk from the
state. A chunk as long as the sequence is the parallel form alone; chunks of one token are the recurrence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 64


def step(rows: Sequence[Tensor], log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """(out [B, H, Dv], states after) of one token for each of B sequences with `state` [B, H, Dk, Dv]."""
    query, key, value = (r.to(state.dtype) for r in rows)
    state = log_decay.to(state.dtype).exp()[:, None, None] * state + key[..., None] * value[..., None, :]
    return (query[..., None, :] @ state)[..., 0, :], state


def scan(rows: Sequence[Tensor], log_decay: Tensor, state: Tensor, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """(out [T, H, Dv], state after) of T tokens on from `state` [H, Dk, Dv], `chunk` of them at once.

    Args:
        rows: query and key [T, H, Dk], value [T, H, Dv].
        log_decay: [H].
    """
    # heads first, so that every product is a batch over heads
    wide = [r.to(state.dtype).transpose(0, 1) for r in rows]
    decay, outs = log_decay.to(state.dtype)[:, None], []
    for start in range(0, wide[0].shape[1], chunk):
        out, state = _chunk([r[:, start : start + chunk] for r in wide], decay, state)
        outs.append(out)
    return torch.cat(outs, dim=1).transpose(0, 1), state


def _chunk(rows: Sequence[Tensor], decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    query, key, value = rows
    size = query.shape[1]
    place = torch.arange(size, device=query.device, dtype=query.dtype)
    distance = place[:, None] - place[None, :]
    remains = (decay[..., None] * distance).masked_fill(distance < 0, float("-inf")).exp()
    before = (decay * (place + 1)).exp()[..., None]
    out = ((query @ key.transpose(1, 2)) * remains) @ value + (query * before) @ state
    after = (decay * (size - 1 - place)).exp()[..., None]
    return out, (decay * size).exp()[..., None] * state + (key * after).transpose(1, 2) @ value
