"""Which experts a token runs through, and how much each counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.models.facts import fact
from kvlab.models.weights import Names, Scope

SCORES = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}
# not a function of the logits alone: experts are chosen one after the other
MIXER = "sparsemixer"


@dataclass(frozen=True)
class RouterFacts:
    """How experts are chosen and weighted.

    A softmax over the chosen logits alone (Mixtral, gpt-oss, Granite) is a softmax over all, normalised.
    Names: `gate.weight` [E, hidden], `gate.bias`, `gate.e_score_correction_bias` [E].

    Attributes:
        num_experts, top_k: how many there are, and how many a token runs through.
        score: "softmax", "sigmoid" or "sqrtsoftplus" of the logits, or "sparsemixer" (see `jitter`).
        bias: whether the logits have one.
        correction: whether a bias is added to the scores for the choice alone, not for the weights.
        num_groups, top_groups, group_members: experts lie in `num_groups` groups of neighbours; only the best
            `top_groups` are eligible (0: all), by the sum of their best `group_members` scores.
        normalise: whether the weights of the chosen sum to one (before `scale`). floor: added to that sum.
        scale: factor on the weights.
        on_input: whether weights multiply what experts read instead of what they give (Llama 4).
        jitter: of sparsemixer: experts are chosen one after the other, each weighted by a softmax over those logits that are
            within a relative distance of 2 * jitter of the best remaining one (Phi-3.5-MoE).
    """

    num_experts: int
    top_k: int = fact("length", 1)
    score: str = fact("one of softmax, sigmoid", "softmax")
    bias: bool = False
    correction: bool = False
    num_groups: int = 1
    top_groups: int = fact("length", 0)
    group_members: int = fact("off", 1)
    normalise: bool = fact("flip", False)
    floor: float = 0.0
    scale: float = fact("scale", 1.0)
    on_input: bool = fact("flip", False)
    jitter: float = fact("scale", 0.0)


class Router:
    """Call it on [T, hidden]: weights, at least fp32, [T, top_k], and the experts they belong to, int64 [T, top_k]."""

    def __init__(self, facts: RouterFacts, scope: Scope, hidden: int) -> None:
        f = self.facts = facts
        self.weight = scope.take("gate.weight", f.num_experts, hidden)
        self.bias = scope.take("gate.bias", f.num_experts) if f.bias else None
        self.correction = scope.take("gate.e_score_correction_bias", f.num_experts) if f.correction else None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f, wide = self.facts, torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        logits = F.linear(x.to(wide), self.weight.to(wide), bias)
        top_k = min(f.top_k, f.num_experts)
        if f.score == MIXER:
            weights, chosen = _one_by_one(logits, top_k, f.jitter)
        else:
            scores = SCORES[f.score](logits)
            judged = scores if self.correction is None else scores + self.correction.to(wide)
            chosen = (_best_groups(judged, f) if f.top_groups else judged).topk(top_k, dim=-1).indices
            weights = scores.gather(-1, chosen)
        if f.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + f.floor)
        return weights * f.scale, chosen


def _best_groups(judged: Tensor, f: RouterFacts) -> Tensor:
    """`judged` [T, E], -inf outside of each token's best groups."""
    grouped = judged.unflatten(-1, (f.num_groups, -1))
    best = grouped.topk(f.group_members, dim=-1).values.sum(-1)
    allowed = torch.zeros_like(best, dtype=torch.bool)
    allowed.scatter_(-1, best.topk(min(f.top_groups, f.num_groups), dim=-1).indices, True)
    return grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)


def _one_by_one(logits: Tensor, top_k: int, jitter: float) -> tuple[Tensor, Tensor]:
    """SparseMixer's choice without its sampling: (weights, experts), both [T, top_k].

    Source: arXiv 2409.12136; transformers 5.24.0 modeling_phimoe.py, `sparsemixer`.
    """
    left, weights, chosen = logits, [], []
    for _ in range(top_k):
        best, expert = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * jitter
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, expert))
        chosen.append(expert)
        left = left.scatter(-1, expert, float("-inf"))
    return torch.cat(weights, -1), torch.cat(chosen, -1)


def reference(facts: RouterFacts, weights: Names, x: Tensor) -> list[tuple[int, Tensor]]:
    """(expert, weight) of each expert that the token with `x` [hidden] runs through, in plain Python."""
    f = facts
    logits = weights["gate.weight"] @ x
    logits = logits + weights["gate.bias"] if f.bias else logits
    if f.score == MIXER:
        return _reference_one_by_one(f, logits)
    scores = SCORES[f.score](logits)
    judged = (scores + weights["gate.e_score_correction_bias"] if f.correction else scores).tolist()
    size = f.num_experts // f.num_groups
    groups = [range(i * size, (i + 1) * size) for i in range(f.num_groups)]
    if f.top_groups:
        groups.sort(key=lambda g: -sum(sorted((judged[e] for e in g), reverse=True)[: f.group_members]))
        groups = groups[: f.top_groups]
    chosen = sorted((e for g in groups for e in g), key=lambda e: -judged[e])[: f.top_k]
    total = sum(scores[e] for e in chosen) + f.floor if f.normalise else 1.0
    return [(e, f.scale * scores[e] / total) for e in chosen]


def _reference_one_by_one(f: RouterFacts, logits: Tensor) -> list[tuple[int, Tensor]]:
    left, found = set(range(f.num_experts)), []
    for _ in range(f.top_k):
        best = max(left, key=lambda e: float(logits[e]))
        near = [e for e in left if (logits[best] - logits[e]) / max(abs(logits[e]), logits[best]) <= 2 * f.jitter]
        found.append((best, (logits[best] - torch.logsumexp(logits[near], 0)).exp()))
        left.remove(best)
    return found
