"""The recurrence of Mamba-2 with few, large products: chunks of tokens at once, and one token of many sequences at once.

Within a chunk that begins with state S0, and with G the log decay summed from the chunk's first token on,

    out_i = exp(G_i) S0 c_i + sum over j <= i of exp(G_i - G_j) (c_i . b_j) dt_j x_j

which is attention with c as query, b as key, dt x as value, and a decay in place of the softmax. The exponents are
never positive: strong decays underflow to zero and do not overflow. G is summed and subtracted in fp64, because a
difference of two large sums would lose the small decays after a strong one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 64


def step(rows: Sequence[Tensor], decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """(out [B, H, P], states after) of one token for each of B sequences with `state` [B, H, P, N]."""
    x, dt, b, c = (r.to(state.dtype) for r in rows)
    per_group = x.shape[1] // b.shape[1]
    b, c = (v.repeat_interleave(per_group, dim=1) for v in (b, c))
    kept = (dt * decay.to(state.dtype)).exp()[..., None, None] * state
    state = kept + (dt[..., None] * x)[..., None] * b[:, :, None]
    return (state @ c[..., None])[..., 0], state


def scan(rows: Sequence[Tensor], decay: Tensor, state: Tensor, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """(out [T, H, P], state after) of T tokens on from `state` [H, P, N], `chunk` of them at once.

    Args:
        rows: x [T, H, P], dt [T, H], b and c [T, G, N].
        decay: [H].
    """
    x, dt, b, c = (r.to(state.dtype) for r in rows)
    groups, heads = b.shape[1], x.shape[1]
    by_group = (groups, heads // groups)
    # groups first, then the heads of a group, so that every product is a batch over both
    value = (dt[..., None] * x).transpose(0, 1).unflatten(0, by_group)  # [G, H / G, T, P]
    steps = (dt.double() * decay.double()).T.unflatten(0, by_group)  # [G, H / G, T]
    b, c = (v.transpose(0, 1)[:, None] for v in (b, c))  # [G, 1, T, N]
    state, outs = state.unflatten(0, by_group), []
    for start in range(0, len(x), chunk):
        part = slice(start, start + chunk)
        out, state = _chunk(value[:, :, part], steps[:, :, part].cumsum(-1), (b[:, :, part], c[:, :, part]), state)
        outs.append(out)
    return torch.cat(outs, dim=2).flatten(0, 1).transpose(0, 1), state.flatten(0, 1)


def _chunk(value: Tensor, total: Tensor, bc: tuple[Tensor, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """(out [G, H / G, n, P], state after) of one chunk; `total` [G, H / G, n] is G, in fp64."""
    b, c = bc
    later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
    apart, left = total[..., :, None] - total[..., None, :], total[..., -1:] - total
    fade = apart.to(state.dtype).masked_fill_(later, float("-inf")).exp_()
    kept = total.to(state.dtype).exp()[..., None]
    out = (c @ b.mT * fade) @ value + kept * (c @ state.mT)
    stored = (left.to(state.dtype).exp()[..., None] * value).mT @ b
    return out, kept[..., -1:, :] * state + stored
