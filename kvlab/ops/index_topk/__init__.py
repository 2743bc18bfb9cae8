"""The lightning indexer: small queries score every cached index key, and each token keeps the best few positions."""

from __future__ import annotations

import torch

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.dispatch import backend
from kvlab.ops.index_topk import reference, torch_
from kvlab.ops.views import SegmentViews


def index_topk(
    query: torch.Tensor,
    weights: torch.Tensor,
    views: SegmentViews,
    batch: AttentionBatch,
    *,
    top_k: int,
    ratio: int = 1,
) -> torch.Tensor:
    """The entries that each token attends to, int64 [T, k], k <= `top_k`; -1 where there are fewer, and in padded rows.

    Entry s scores sum over heads h of weights[h] * ReLU(query[h] . key[s]). A token at position t may choose from
    entries 0 .. (t + 1) // ratio - 1. A positive factor on the scores would change no choice, so none is applied.

    Args:
        query: [T, Hi, D]. weights: [T, Hi].
        views: pages of index keys ("index"), the step's own included.
        batch: the step, with the block table of the index keys.
        ratio: tokens per entry.

    Raises:
        ValueError: top_k or ratio not positive.
    """
    if top_k < 1 or ratio < 1:
        raise ValueError(f"top_k {top_k}, ratio {ratio}: must be positive")
    longest = batch.max_seq_len // ratio
    chosen = torch.full((len(query), min(top_k, longest)), -1, dtype=torch.int64, device=query.device)
    if longest:
        run = reference if backend(query) == "reference" else torch_
        run.index_topk(query, weights, views, batch, ratio, chosen)
    return chosen
