"""The gated delta rule with few, large products: chunks of tokens at once, and one token of many sequences at once.

Within a chunk that begins with state S0, and with G the log decay summed from the chunk's first token on,

    S_i = exp(G_i) S0 + sum over j <= i of exp(G_i - G_j) k_j u_j^T

where u_j is what token j wrote: beta_j times its value less what was stored. That depends on the tokens before it in
the chunk, so all u are the solution of one triangular system. Nothing is divided by a decay: the exponents above are
never positive, so strong decays underflow to zero and do not overflow.

Source: Parallelizing Linear Transformers with the Delta Rule (arXiv 2406.06484), section 3, the WY representation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 64
CHUNK_PER_CHANNEL = 16
"""With a decay per channel a chunk of C tokens needs C * C * Dk factors per head."""


def step(rows: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """(out [B, H, Dv], states after) of one token for each of B sequences with `state` [B, H, Dk, Dv]."""
    query, key, value, log_decay, beta = (r.to(state.dtype) for r in rows)
    state = log_decay.exp()[..., None] * state
    stored = (key[..., None, :] @ state)[..., 0, :]
    state = state + key[..., None] * (beta[..., None] * (value - stored))[..., None, :]
    return (query[..., None, :] @ state)[..., 0, :], state


def scan(rows: Sequence[Tensor], state: Tensor, chunk: int | None = None) -> tuple[Tensor, Tensor]:
    """(out [T, H, Dv], state after) of T tokens on from `state` [H, Dk, Dv], `chunk` of them at once.

    Args:
        rows: query and key [T, H, Dk], value [T, H, Dv], log_decay [T, H, 1] or [T, H, Dk], beta [T, H].
    """
    size = chunk or (CHUNK if rows[3].shape[2] == 1 else CHUNK_PER_CHANNEL)
    # heads first, so that every product is a batch over heads
    wide = [r.to(state.dtype).transpose(0, 1) for r in rows]
    outs = []
    for start in range(0, wide[0].shape[1], size):
        out, state = _chunk([r[:, start : start + size] for r in wide], state)
        outs.append(out)
    return torch.cat(outs, dim=1).transpose(0, 1), state


def _chunk(rows: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    query, key, value, log_decay, beta = rows
    # in fp64: after a strong decay a mild one would be lost in the rounding of the sum
    total = log_decay.double().cumsum(1)
    within = _Pairs(key, total)
    first, last = total.exp().to(state.dtype), (total[:, -1:] - total).exp().to(state.dtype)
    written_by_earlier = (beta[..., None] * within.products(key)).tril(-1)
    not_stored = beta[..., None] * (value - (key * first) @ state)
    written = torch.linalg.solve_triangular(written_by_earlier, not_stored, upper=False, unitriangular=True)
    out = (query * first) @ state + within.products(query) @ written
    return out, first[:, -1:].transpose(1, 2) * state + (key * last).transpose(1, 2) @ written


class _Pairs:
    """Products of a row i with the keys of rows j <= i, each key decayed from j to i; 0 for j > i."""

    def __init__(self, key: Tensor, total: Tensor) -> None:
        later = torch.ones(key.shape[1], key.shape[1], dtype=torch.bool, device=key.device).triu(1)
        between = (total[:, :, None] - total[:, None]).to(key.dtype)
        decay = between.masked_fill_(later[:, :, None], float("-inf")).exp_()
        self._key = key
        # [H, C, C] where all channels decay alike, else the decayed keys [H, C, C, Dk] themselves
        self._decay = decay[..., 0] if total.shape[2] == 1 else decay * key[:, None]
        self._per_channel = total.shape[2] > 1

    def products(self, x: Tensor) -> Tensor:
        """[H, C, C] of `x` [H, C, Dk]."""
        if self._per_channel:
            return (self._decay @ x[..., None])[..., 0]
        return (x @ self._key.transpose(1, 2)) * self._decay
