"""How much a query could see in a page, from bounds alone: Quest's criterion for which pages to read."""

from __future__ import annotations

import torch

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.dispatch import backend


def page_scores(
    query: torch.Tensor, bounds: tuple[torch.Tensor, torch.Tensor], batch: AttentionBatch, block_size: int
) -> torch.Tensor:
    """fp32 [B, Hkv, width]: for each page of each decode, no key in it has a larger product with the query.

    The bound of one query head is the sum over d of max(q_d * low_d, q_d * high_d); a KV head's score is the largest
    of its query heads. A page behind the sequence's end, or a null page, gets -inf.

    Args:
        query: [B, Hq, D], the batch's decodes.
        bounds: (low, high), [num_pages, Hkv, D] each: smallest and largest value of every channel over a page's keys.
        batch: the step; `block_table` [B, width].
        block_size: tokens of a page.

    Raises:
        ValueError: bounds of other shapes than the query asks for.

    Source: Quest (arXiv 2406.10774), section 3.3.
    """
    low, high = bounds
    if low.shape != high.shape or low.shape[2] != query.shape[2] or query.shape[1] % low.shape[1]:
        raise ValueError(
            f"bounds {tuple(low.shape)}, {tuple(high.shape)}: must be [pages, Hkv, D] for query {tuple(query.shape)}"
        )
    if backend(query, triton=True) == "triton":
        from kvlab.ops.page_scores import triton_

        out = query.new_empty((query.shape[0], low.shape[1], batch.block_table.shape[1]), dtype=torch.float32)
        triton_.score_launch(query, bounds, batch, block_size, out).run()
        return out
    from kvlab.ops.page_scores import reference

    return reference.page_scores(query, bounds, batch, block_size)
