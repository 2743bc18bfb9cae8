"""Linear attention over states in pages: keys and values are summed into one matrix per head, which may decay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.linear_attention import reference, torch_
from kvlab.ops.states import over_sequences, use_reference, wide


def linear_attention(
    rows: tuple[Tensor, Tensor, Tensor], log_decay: Tensor, states: Tensor, batch: AttentionBatch
) -> Tensor:
    """What each token reads from its sequence's state after its own update, [T, H, Dv] in the dtype of the values.

    Of each head the state S [Dk, Dv] becomes, token after token,

        S = exp(log_decay) * S + key value^T
        out = query S

    which is attention without a softmax: out at t is the sum over s <= t of exp((t - s) * log_decay) (query_t key_s)
    value_s. Without decay it is linear attention, with one constant per head RetNet's retention.

    Args:
        rows: query and key [T, H, Dk], scaled already, and value [T, H, Dv], of the step's tokens.
        log_decay: [H], not positive.
        states: [num_pages, H * Dk * Dv], a view of the pages; changed in place.
        batch: the step.

    Source: Transformers are RNNs (arXiv 2006.16236), section 3.2; RetNet (arXiv 2307.08621), section 2.
    """
    query, _, value = rows
    shape = (*query.shape[1:], value.shape[2])
    scan = reference.scan if use_reference() else torch_.scan

    def decode(inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        out, state = torch_.step(inputs, log_decay, wide(state).view(-1, *shape))
        return out, state.flatten(1)

    def chunk(inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        out, state = scan(inputs, log_decay, wide(state).view(shape))
        return out, state.flatten()

    return over_sequences(rows, states, batch, torch.empty_like(value), decode=decode, chunk=chunk)
