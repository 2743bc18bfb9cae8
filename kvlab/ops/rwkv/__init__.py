"""RWKV-4's running average over states in pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.rwkv import reference, torch_
from kvlab.ops.states import over_sequences, use_reference, wide


def running_average(
    key: Tensor, value: Tensor, weights: tuple[Tensor, Tensor], states: Tensor, batch: AttentionBatch
) -> Tensor:
    """The weighted mean of the values so far, per channel, [T, C] in the dtype of `value`.

        sum over s <= t of exp(weight(t, s)) value_s  /  sum over s <= t of exp(weight(t, s))

    where weight(t, s) is key_s, less decay for every token between s and t, and key_t + bonus for s = t. A state holds
    per channel the numerator, the denominator, and the logarithm that both are divided by the exponential of.

    Args:
        key, value: [T, C], of the step's tokens.
        weights: decay [C], positive: what a token loses per step; bonus [C].
        states: [num_pages, 3 * C], a view of the pages; changed in place.
        batch: the step.

    Source: RWKV (arXiv 2305.13048), equation 16 and appendix D.
    """
    scan = reference.scan if use_reference() else torch_.scan
    channels = key.shape[1]

    def decode(inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        out, state = torch_.step(inputs, weights, wide(state).view(-1, 3, channels))
        return out, state.flatten(1)

    def chunk(inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        out, state = scan(inputs, weights, wide(state).view(3, channels))
        return out, state.flatten()

    return over_sequences((key, value), states, batch, torch.empty_like(value), decode=decode, chunk=chunk)
