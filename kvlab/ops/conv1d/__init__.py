"""Causal convolution of each channel with its own past, over states in pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.conv1d import reference, torch_
from kvlab.ops.states import over_sequences, use_reference, wide


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: AttentionBatch) -> Tensor:
    """sum over j of weight[:, j] * (input at position t - (k - 1) + j), plus `bias`; [T, C] in x's dtype, no activation.

    What lies before a sequence's start counts as zero. A page keeps the k - 1 inputs that the next token still reads,
    [k - 1, C] flat, oldest first. Sums run in fp32 (fp64 for fp64). Padded rows give zeros.

    Args:
        x: [T, C], the inputs of the step's tokens.
        weight: [C, k], k at least 2; the last column meets the token itself.
        bias: [C] or None.
        states: [num_pages, (k - 1) * C], a view of the pages in x's dtype; changed in place.
        batch: the step.

    Raises:
        ValueError: pages of another width.
    """
    channels, taps = weight.shape
    if states.shape[1] != channels * (taps - 1):
        raise ValueError(
            f"states of {states.shape[1]} values: {channels} channels and {taps} taps keep {taps - 1} each"
        )

    def decode(inputs: Sequence[Tensor], past: Tensor) -> tuple[Tensor, Tensor]:
        result, past = torch_.step(inputs[0], weight, bias, wide(past).view(-1, taps - 1, channels))
        return result, past.flatten(1)

    def chunk(inputs: Sequence[Tensor], past: Tensor) -> tuple[Tensor, Tensor]:
        result, past = scan(inputs[0], weight, bias, wide(past).view(taps - 1, channels))
        return result, past.flatten()

    scan = reference.scan if use_reference() else torch_.scan
    return over_sequences((x,), states, batch, torch.empty_like(x), decode=decode, chunk=chunk)
