"""The gated delta rule over states in pages: what a key has stored is corrected, not added to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.dispatch import backend
from kvlab.ops.gated_delta import reference, torch_
from kvlab.ops.states import over_sequences, use_reference, wide


@dataclass(frozen=True)
class DeltaRows:
    """What a token brings to the gated delta rule, for T tokens, H value heads and Hk key heads (H a multiple of Hk).

    Attributes:
        query, key: [T, Hk, Dk], normed; each key head serves H / Hk value heads in a row.
        value: [T, H, Dv].
        log_decay: not positive; [T, H, 1], the same for all channels of a head, or [T, H, Dk], one per channel (KDA).
        beta: [T, H], how far the stored value moves to the new one, 0 to 1.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor


def gated_delta(rows: DeltaRows, states: Tensor, batch: AttentionBatch, *, scale: float) -> Tensor:
    """What each token reads from its sequence's state after its own update, [T, H, Dv] in the dtype of the values.

    Of each head the state S [Dk, Dv] becomes, token after token,

        S = exp(log_decay) * S                  decay, per row of S
        S = S + beta * key (value - key S)^T    the value stored under the key moves to the new one
        out = scale * query S

    Args:
        rows: of the step's T tokens.
        states: [num_pages, H * Dk * Dv], a view of the pages; changed in place.
        batch: the step.
        scale: factor on the queries, usually Dk ** -0.5.

    Raises:
        ValueError: value heads that are no multiple of the key heads.

    Source: Gated Delta Networks (arXiv 2412.06464), equation 10; per channel, Kimi Linear (arXiv 2510.26692).
    """
    key_heads, (heads, value_dim) = rows.key.shape[1], rows.value.shape[1:]
    if heads % key_heads:
        raise ValueError(f"value heads {heads}: must be a multiple of the {key_heads} key heads")
    query, key = (x.repeat_interleave(heads // key_heads, dim=1) for x in (rows.query, rows.key))
    shape = (heads, key.shape[2], value_dim)

    def decode(inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        out, state = torch_.step(inputs, wide(state).view(-1, *shape))
        return out, state.flatten(1)

    def chunk(inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        out, state = scan(inputs, wide(state).view(shape))
        return out, state.flatten()

    scan = reference.scan if use_reference() else torch_.scan
    inputs = (query * scale, key, rows.value, rows.log_decay, rows.beta)
    in_place = None
    if states.dtype != torch.float64 and backend(rows.value, triton=True) == "triton":
        from kvlab.ops.gated_delta import triton_

        def in_place(out: Tensor) -> None:
            triton_.decode_launch(tuple(x[: batch.num_decodes] for x in inputs), states, batch, out).run()

    return over_sequences(
        inputs, states, batch, torch.empty_like(rows.value), decode=decode, chunk=chunk, in_place=in_place
    )
