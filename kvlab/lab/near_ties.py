"""Whether rounding alone can have made two runs of a request pick different tokens.

In fp32 a logit's last bits depend on the rows beside it. A greedy pick turns over where the two best logits are close;
a drawn one where the number drawn lies at the edge between two tokens' shares of the cumulated probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvlab.engine import Engine, SamplingParams
from kvlab.engine.sampler import RowParams, probabilities, uniform
from kvlab.schedule import Step

LOGIT_GAP = 1e-3
"""A greedy pick is near a tie when the best logit is ahead of the other token's by less."""
SHARE_GAP = 1e-4
"""A drawn pick is near a tie when the number drawn is closer to the other token's share than this."""
TIE = 1e-12
"""Stands for the distance of an exact tie, so that it is not taken for equal tokens."""


def distance(logits: torch.Tensor, rows: RowParams, token: int) -> float:
    """How far row 0 of `logits` [1, vocab] is from picking `token`, in units of the allowed gap: below 1 is a near tie."""
    if float(rows.temperature[0]) == 0:
        return float(logits[0].max() - logits[0, token]) / LOGIT_GAP
    edges = probabilities(logits, rows)[0].cumsum(dim=0)
    drawn = float(uniform(rows.seed, rows.position)[0] * edges[-1])
    low, high = (float(edges[token - 1]) if token else 0.0), float(edges[token])
    return max(low - drawn, drawn - high, 0.0) / SHARE_GAP


def first_difference(engine: Engine, prompt: Sequence[int], params: SamplingParams, other: Sequence[int]) -> float:
    """0 where `engine` alone gives the tokens `other` after `prompt`; else `distance` at the first that differs.

    Infinite where only the lengths differ.
    """
    found: list[float] = []
    pick = engine._pick

    def watched(step: Step, logits: torch.Tensor) -> torch.Tensor:
        picked = pick(step, logits)
        requests = [chunk.request for chunk in step.sampling]
        index = len(requests[0].output) if requests else len(other)
        if not found and index < len(other) and int(picked[0]) != other[index]:
            rows = engine.row_params(requests, [len(r.tokens) for r in requests], logits)
            gap = distance(logits, rows, other[index])
            found.append(gap if gap != 0 else TIE)
        return picked

    engine._pick = watched  # type: ignore[method-assign]
    alone = engine.generate([list(prompt)], params)[0].token_ids
    if found:
        return found[0]
    return 0.0 if alone == list(other) else float("inf")
