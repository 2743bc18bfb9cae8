"""Attention over a window of shared key-value rows and over compressed entries, in one softmax with a sink per head."""

from __future__ import annotations

import torch

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.compressed_attention import reference, torch_
from kvlab.ops.compressed_attention.rules import Entries, Window
from kvlab.ops.dispatch import backend

__all__ = ["Entries", "Window", "compressed_attention"]


def compressed_attention(
    query: torch.Tensor,
    batch: AttentionBatch,
    window: Window,
    entries: Entries | None,
    *,
    scale: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """[T, H, D] in query's dtype: every head over the same rows, each of them key and value at once.

    The token at position t reads rows max(0, t - size + 1) .. t of the window, and of the entries those in its row of
    `entries.chosen`. Padded rows of the batch give zeros.

    Args:
        query: [T, H, D].
        batch: the step; any block table.
        sinks: [H], one more score per head in the softmax's denominator, with no value; not scaled.
    """
    run = reference if backend(query) == "reference" else torch_
    return run.compressed_attention(query, batch, window, entries, scale, sinks)
