"""Decode over chosen pages: each KV head reads the pages it was told to, and no others."""

from __future__ import annotations

import torch

from kvlab.ops.attention.rules import Rules
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.dispatch import backend
from kvlab.ops.views import PageViews


def selected_pages(
    query: torch.Tensor, views: PageViews, batch: AttentionBatch, chosen: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Attention of the batch's decodes over chosen pages alone, [B, Hq, Dv] in query's dtype.

    A Triton kernel reads codes of one value each without scales; of other formats torch gathers and decodes the chosen
    pages.

    Args:
        query: [B, Hq, D].
        views: the layer's pages.
        batch: the step.
        chosen: int32 [B, Hkv, n], places in the sequence's block table, none twice; -1 for none. Tokens behind the
            sequence's end are not read; a head whose row is all -1 gives zeros.
        scale: factor on the scores.

    Raises:
        ValueError: `chosen` of another shape.
    """
    if chosen.dim() != 3 or chosen.shape[:2] != (query.shape[0], views.k.shape[1]):
        raise ValueError(f"chosen {tuple(chosen.shape)}: must be [{query.shape[0]}, {views.k.shape[1]}, n]")
    name = backend(query, triton=True)
    if name == "triton":
        from kvlab.ops.selected_pages import triton_

        if triton_.supports(query, views):
            out = query.new_empty((*query.shape[:2], views.value_dim))
            for launch in triton_.decode_launches(query, views, (batch, chosen), Rules(scale), out):
                launch.run()
            return out
    from kvlab.ops.selected_pages import reference, torch_

    return (reference if name == "reference" else torch_).selected_pages(query, views, batch, chosen, scale)
