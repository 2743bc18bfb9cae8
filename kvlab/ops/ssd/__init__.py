"""The recurrence of Mamba-2 (state space duality) over states in pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.dispatch import backend
from kvlab.ops.ssd import reference, torch_
from kvlab.ops.states import over_sequences, use_reference, wide


@dataclass(frozen=True)
class SSDRows:
    """What a token brings to the recurrence, for T tokens, H heads of width P, and G groups (H a multiple of G).

    Attributes:
        x: [T, H, P], the values that are stored.
        dt: [T, H], positive: how far time moves on.
        b, c: [T, G, N], under what a value is stored and what is read; each group serves H / G heads in a row.
    """

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor


def ssd(rows: SSDRows, decay: Tensor, states: Tensor, batch: AttentionBatch) -> Tensor:
    """What each token reads from its sequence's state after its own update, [T, H, P] in the dtype of the values.

    Of each head the state S [P, N] becomes, token after token,

        S = exp(dt * decay) * S + dt * x b^T        one number fades the whole state of a head
        out = S c

    Args:
        rows: of the step's T tokens.
        decay: [H], negative (A in the paper).
        states: [num_pages, H * P * N], a view of the pages; changed in place.
        batch: the step.

    Raises:
        ValueError: heads that are no multiple of the groups.

    Source: Transformers are SSMs (arXiv 2405.21060), equation 16 and section 6.
    """
    (heads, width), (groups, size) = rows.x.shape[1:], rows.b.shape[1:]
    if heads % groups:
        raise ValueError(f"heads {heads}: must be a multiple of the {groups} groups of B and C")
    shape = (heads, width, size)

    def decode(inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        out, state = torch_.step(inputs, decay, wide(state).view(-1, *shape))
        return out, state.flatten(1)

    def chunk(inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        out, state = scan(inputs, decay, wide(state).view(shape))
        return out, state.flatten()

    scan = reference.scan if use_reference() else torch_.scan
    inputs = (rows.x, rows.dt, rows.b, rows.c)
    in_place = None
    if states.dtype != torch.float64 and backend(rows.x, triton=True) == "triton":
        from kvlab.ops.ssd import triton_

        def in_place(out: Tensor) -> None:
            triton_.decode_launch(tuple(x[: batch.num_decodes] for x in inputs), decay, states, batch, out).run()

    return over_sequences(
        inputs, states, batch, torch.empty_like(rows.x), decode=decode, chunk=chunk, in_place=in_place
    )
