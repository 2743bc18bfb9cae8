"""The recurrence of Mamba (selective scan) over states in pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.selective_scan import reference, torch_
from kvlab.ops.states import over_sequences, use_reference, wide


@dataclass(frozen=True)
class ScanRows:
    """What a token brings to the recurrence, for T tokens and D channels with N values of state each.

    Attributes:
        x: [T, D], the values that are stored.
        dt: [T, D], positive: how far time moves on, for each channel.
        b, c: [T, N], under what a value is stored and what is read; the same for all channels.
    """

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor


def selective_scan(rows: ScanRows, decay: Tensor, states: Tensor, batch: AttentionBatch) -> Tensor:
    """What each token reads from its sequence's state after its own update, [T, D] in the dtype of the values.

    The state S [D, N] becomes, token after token,

        S = exp(dt * decay) * S + (dt * x) b^T      every value of the state fades by itself
        out = S c

    Args:
        rows: of the step's T tokens.
        decay: [D, N], negative (A in the paper).
        states: [num_pages, D * N], a view of the pages; changed in place.
        batch: the step.

    Source: Mamba (arXiv 2312.00752), equation 2 and algorithm 2, with B discretised as dt * B as in its code.
    """

    def decode(inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        out, state = torch_.step(inputs, decay, wide(state).view(-1, *decay.shape))
        return out, state.flatten(1)

    def chunk(inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        out, state = scan(inputs, decay, wide(state).view(decay.shape))
        return out, state.flatten()

    scan = reference.scan if use_reference() else torch_.scan
    inputs = (rows.x, rows.dt, rows.b, rows.c)
    return over_sequences(inputs, states, batch, torch.empty_like(rows.x), decode=decode, chunk=chunk)
