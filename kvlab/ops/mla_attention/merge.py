"""Attention over parts of a context, made one: each part counts by the sum of its exponentials."""

from __future__ import annotations

import torch


def merge(results: torch.Tensor, totals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(attention [..., V], log of its denominator [...]) over all parts together.

    Args:
        results: [parts, ..., V], attention over each part alone; of an empty part anything, NaN too.
        totals: [parts, ...], natural logarithm of the sum of exponentials of each part; -inf for an empty one. Where
            all are empty the result is 0 and -inf.
    """
    highest = totals.amax(0)
    shares = (totals - highest.masked_fill(highest == float("-inf"), 0)).exp()
    total = shares.sum(0)
    weights = (shares / total.masked_fill(total == 0, 1))[..., None]
    merged = (torch.where(weights > 0, results, 0) * weights).sum(0)
    return merged, totals.logsumexp(0)
