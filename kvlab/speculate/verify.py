"""The verifier: picks a token for each row of a step so that what comes out is distributed as without drafts.

Every row, after the last known token and after each draft, is given a token. A draft is right exactly when its row's
token equals it, so chains and trees are verified by one walk. How a row's token is picked depends on its drafts:

    chosen drafts (n-grams, the likeliest tokens of a head): the token that the sampler picks anyway. A draft x is right
        with probability p(x) = min(1, p(x) / q(x)) for q all on x, and otherwise the token has the distribution p
        without x, which is norm(max(p - q, 0)): the rule below, and the very tokens of a run without drafts.
    drafts drawn from q: one after the other right with probability min(1, p(x) / q(x)); after each that is wrong, p
        becomes norm(max(p - q, 0)); when all are wrong the token is drawn from what p has become.

Random numbers are functions of the request's seed, the position and the purpose, so that a row decides the same
whatever else is in the batch. Source: Leviathan et al. 2023, Algorithm 1; for several drafts of one row: Miao et al.
2024, SpecInfer, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.engine.sampler import RowParams, draw, probabilities, sample, uniform
from kvlab.speculate.draft import ROOT, Draft

RESIDUAL = 1


def drawing(sibling: int) -> int:
    """The stream of random numbers from which the `sibling`-th draft of a row is drawn."""
    return 2 + 2 * sibling


def accepting(sibling: int) -> int:
    """The stream of random numbers that decides whether the `sibling`-th draft of a row is right."""
    return 3 + 2 * sibling


@dataclass(frozen=True, eq=False)
class Drawn:
    """Drafts that were drawn: for n of a step's rows the drafts that follow, and what they were drawn from.

    Attributes:
        row: int64 [n]. token: int64 [n, m], -1 where a row has fewer than m drafts. q: float64 [n, vocab].
    """

    row: Tensor
    token: Tensor
    q: Tensor


def pick(logits: Tensor, rows: RowParams, drawn: Drawn | None = None) -> Tensor:
    """The token of each row, int64 [R]; -1 where the row's largest logit is not a finite number.

    Args:
        logits: [R, vocab] of the model that is to be followed.
        rows: the request's parameters, and the position of the token that follows each row.
    """
    token = sample(logits, rows)
    if drawn is None:
        return token
    own = rows.at(drawn.row)
    chosen = _choose(probabilities(logits[drawn.row], own), drawn, own)
    return token.index_put((drawn.row,), torch.where(token[drawn.row] < 0, -1, chosen))


def _choose(p: Tensor, drawn: Drawn, rows: RowParams) -> Tensor:
    """The token of each of n rows with drafts drawn from q; `p` [n, vocab] is not changed."""
    chosen = torch.full_like(drawn.row, -1)
    for i in range(drawn.token.shape[1]):
        token = drawn.token[:, i]
        open_ = (token >= 0) & (chosen < 0)
        at = token.clamp(min=0)[:, None]
        ratio = uniform(rows.seed, rows.position, accepting(i)) * drawn.q.gather(1, at)[:, 0]
        right = open_ & (ratio < p.gather(1, at)[:, 0])
        chosen = torch.where(right, token, chosen)
        rest = (p - drawn.q).clamp(min=0)
        total = rest.sum(-1, keepdim=True)
        # where p and q are equal up to rounding nothing is left, and nothing was wrong
        p = torch.where((open_ & ~right)[:, None] & (total > 0), rest / total, p)
    return torch.where(chosen < 0, draw(p, uniform(rows.seed, rows.position, RESIDUAL)), chosen)


def walk(draft: Draft, picked: Sequence[int]) -> tuple[list[int], int]:
    """(indices of the drafts that are right, in order; the token that follows the last of them).

    Args:
        draft: at least as many drafts as were verified.
        picked: the token of the last known token's row, then of each draft's.
    """
    path, at = [], ROOT
    for i in range(len(picked) - 1):
        # children come after their parents, so one pass finds the whole path
        if draft.parent(i) == at and draft.tokens[i] == picked[at + 1]:
            path.append(i)
            at = i
    return path, picked[at + 1]
