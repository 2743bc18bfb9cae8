"""Attention over latents in pages: per token one latent and one rotary key, from which every head's key and value follow."""

from __future__ import annotations

import torch

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.dispatch import backend
from kvlab.ops.mla_attention import absorbed, expanded, reference
from kvlab.ops.mla_attention.rule import expands
from kvlab.ops.mla_attention.selected import selected_attention
from kvlab.ops.views import SegmentViews

__all__ = ["mla_attention", "selected_attention"]


def mla_attention(
    query: torch.Tensor, up: torch.Tensor, views: SegmentViews, batch: AttentionBatch, *, scale: float
) -> torch.Tensor:
    """Attention of each token over its sequence's latents up to itself, [T, H, V] in query's dtype.

    With latent c_s (C values) and rotary key r_s (R values) in the pages, head h has key [K_h c_s, r_s] and value
    V_h c_s, where up[h] = [K_h; V_h]. Decodes never form them: (K_h^T q) . c_s is the same product. A prefill chunk
    forms them where that is fewer operations (`rule.expands`). Padded rows give zeros. Sums run in fp32 (fp64 for fp64).

    Args:
        query: [T, H, N + R], unrotated values first.
        up: [H, N + V, C].
        views: the layer's pages ("latent", "rope"), already holding the step's own tokens.
        batch: the step.
        scale: factor on the scores.

    Raises:
        ValueError: widths that do not fit one another.
    """
    _check(query, up, views)
    out = query.new_zeros(*query.shape[:2], up.shape[1] - (query.shape[2] - views.width("rope")))
    if backend(query) == "reference":
        reference.mla_attention(query, up, views, batch, scale, out)
        return out
    if batch.num_decodes:
        _decodes(query, up, views, batch, scale, out)
    row = batch.num_decodes
    for i in range(batch.num_decodes, len(batch.query_lens)):
        count, end = batch.query_lens[i], batch.ends[i]
        run = expanded if expands(count, end, up.shape[2], up.shape[1]) else absorbed
        rows = slice(row, row + count)
        out[rows] = run.chunk(query[rows], up, views, (batch.block_table[i], end), scale).to(out.dtype)
        row += count
    return out


def _decodes(
    query: torch.Tensor, up: torch.Tensor, views: SegmentViews, batch: AttentionBatch, scale: float, out: torch.Tensor
) -> None:
    run = absorbed.decodes
    if backend(query, triton=True) == "triton":
        from kvlab.ops.mla_attention import triton_

        run = triton_.decodes if triton_.supports(query, views) else run
    run(query, up, views, batch, scale, out)


def _check(query: torch.Tensor, up: torch.Tensor, views: SegmentViews) -> None:
    latent, rope = views.width("latent"), views.width("rope")
    if up.shape[2] != latent:
        raise ValueError(f"up of {up.shape[2]} columns: the pages hold latents of {latent} values")
    if query.shape[1] != up.shape[0] or not query.shape[2] - rope < up.shape[1]:
        raise ValueError(
            f"query {tuple(query.shape)}, up {tuple(up.shape)}: must have the same heads, and "
            f"{query.shape[2] - rope} rows of keys before at least one of values"
        )
