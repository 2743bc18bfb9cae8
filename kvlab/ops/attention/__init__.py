"""Attention over pages."""

from __future__ import annotations

import torch

from kvlab.ops.attention import grouped, reference, torch_
from kvlab.ops.attention.rules import Rules
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.dispatch import backend
from kvlab.ops.grouped_views import GroupedViews
from kvlab.ops.views import PageViews


def paged_attention(
    query: torch.Tensor,
    views: PageViews | GroupedViews,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    chunk: int = 0,
    sinks: torch.Tensor | None = None,
    alibi: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each token over its sequence's pages up to itself, [T, Hq, Dv] in query's dtype.

    The token at position t sees positions max(0, t - window + 1) .. t. Only entries of live tokens are read:
    not the null page, not a slot behind the sequence's end. Padded rows give zeros. Sums run in fp32 (fp64 for fp64).

    Args:
        query: [T, Hq, D], Hq a multiple of Hkv; query head h reads KV head h // (Hq / Hkv).
        views: the layer's pages, already holding the step's own tokens; keys have D values, values Dv.
        batch: the step.
        scale: factor on the scores, usually D ** -0.5.
        window: tokens a query sees, itself included; 0 means all.
        softcap: cap; scores become cap * tanh(score / cap), before masking; 0 means none.
        chunk: a query at t sees from (t // chunk) * chunk on; 0 means from the start.
        sinks: [Hq], one more score per query head in the softmax's denominator, with no value; not scaled or capped.
        alibi: [Hq], slopes; slope * (key position - query position) is added to the scaled and capped score.
        out: where to write the result, [T, Hq, Dv] contiguous.

    Raises:
        ValueError: a tree under rules that go by positions; Hq is not a multiple of Hkv; a negative window, softcap or
            chunk; sinks or slopes not one per head.
    """
    rules = Rules(scale, window, softcap, chunk, sinks, alibi)
    _check(query, views, rules)
    if out is None:
        out = query.new_empty((*query.shape[:2], views.value_dim))
    if batch.tree is not None:
        _check_tree(views, rules)
    if isinstance(views, GroupedViews):
        grouped.paged_attention(query, views, batch, rules, out)
        return out
    name = backend(query, triton=True)
    if (name == "cpu" and not views.in_place) or (batch.tree is not None and name == "cpu"):
        name = "torch"
    if name == "triton":
        from kvlab.ops.attention import triton_

        kernels = triton_ if triton_.supports(query, views) else torch_
        kernels.paged_attention(query, views, batch, rules, out)
    elif name == "reference":
        reference.paged_attention(query, views, batch, rules, out)
    elif name == "torch":
        torch_.paged_attention(query, views, batch, rules, out)
    else:
        from kvlab.ops.attention import cpu

        cpu.paged_attention(query, views, batch, rules, out)
    return out


def _check_tree(views: PageViews | GroupedViews, rules: Rules) -> None:
    """Refuses a tree where a rule goes by positions: a token's slot in a tree is not its position."""
    if rules.window or rules.chunk or rules.alibi is not None or isinstance(views, GroupedViews):
        raise ValueError(
            "batch.tree: trees of tokens need full attention without alibi over pages that close no groups"
        )


def _check(query: torch.Tensor, views: PageViews, rules: Rules) -> None:
    num_heads, num_kv_heads = query.shape[1], views.k.shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(f"query heads {num_heads}: must be a multiple of the {num_kv_heads} KV heads")
    if rules.window < 0 or rules.softcap < 0 or rules.chunk < 0:
        raise ValueError(f"window {rules.window}, softcap {rules.softcap}, chunk {rules.chunk}: must not be negative")
    for name, vector in (("sinks", rules.sinks), ("alibi", rules.alibi)):
        if vector is not None and vector.shape != (num_heads,):
            raise ValueError(
                f"{name} of shape {tuple(vector.shape)}: must hold one value for each of {num_heads} heads"
            )
