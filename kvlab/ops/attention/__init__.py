"""Attention over pages."""

from __future__ import annotations

import torch

from kvlab.ops.attention import reference, torch_
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.dispatch import backend
from kvlab.ops.views import PageViews


def paged_attention(
    query: torch.Tensor,
    views: PageViews,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each token over its sequence's pages up to itself, [T, Hq, D] in query's dtype.

    The token at position t sees positions max(0, t - window + 1) .. t. Only entries of live tokens are read:
    not the null page, not a slot behind the sequence's end. Padded rows give zeros. Sums run in fp32 (fp64 for fp64).

    Args:
        query: [T, Hq, D], Hq a multiple of Hkv; query head h reads KV head h // (Hq / Hkv).
        views: the layer's pages, already holding the step's own tokens.
        batch: the step.
        scale: factor on the scores, usually D ** -0.5.
        window: tokens a query sees, itself included; 0 means all.
        softcap: cap; scores become cap * tanh(score / cap), before masking; 0 means none.
        out: where to write the result, [T, Hq, D] contiguous.

    Raises:
        ValueError: Hq is not a multiple of Hkv, or a negative window or softcap.
    """
    num_kv_heads = views.k.shape[1]
    if query.shape[1] % num_kv_heads:
        raise ValueError(f"query heads {query.shape[1]}: must be a multiple of the {num_kv_heads} KV heads")
    if window < 0 or softcap < 0:
        raise ValueError(f"window {window}, softcap {softcap}: must not be negative")
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    name = backend(query)
    if name == "reference":
        reference.paged_attention(query, views, batch, scale, window, softcap, out)
    elif name == "torch":
        torch_.paged_attention(query, views, batch, scale, window, softcap, out)
    else:
        from kvlab.ops.attention import cpu

        cpu.paged_attention(query, views, batch, scale, window, softcap, out)
    return out
