"""A mixture of experts whose experts a table names for each token id; what the router learns is only their weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvlab.models.modules import moe
from kvlab.models.modules.base import Place, StepContext, WholeContext
from kvlab.models.modules.moe import MoE, MoEFacts
from kvlab.models.modules.router import SCORES
from kvlab.models.weights import Names, Scope


@dataclass(frozen=True)
class HashMoEFacts:
    """The mixture, without a router's choice: `gate.tid2eid` [vocab, columns] has each token id's experts."""

    moe: MoEFacts
    vocab: int
    columns: int


class HashMoE(MoE):
    """The mixture; call it on [T, hidden]."""

    def __init__(self, facts: HashMoEFacts, source: Scope, hidden: int, place: Place) -> None:
        router = replace(facts.moe.router, correction=False)
        super().__init__(replace(facts.moe, router=router), source, hidden, place)
        self.table = source.scope(f"{facts.moe.prefix}.gate").take_table("tid2eid", facts.vocab, facts.columns)

    def route(self, x: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        """Weights [T, top_k] and the experts they belong to, int64 [T, top_k]."""
        f, wide = self.facts.router, torch.promote_types(x.dtype, torch.float32)
        chosen = self.table[step.ids]
        weights = SCORES[f.score](x.to(wide) @ self.router.weight.to(wide).T).gather(-1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + f.floor) if f.normalise else weights
        return weights * f.scale, chosen


def reference(facts: HashMoEFacts, weights: Names, x: Tensor, whole: WholeContext) -> Tensor:
    """The mixture token by token and expert by expert, in plain torch."""
    f, w = facts.moe.router, weights.scope(facts.moe.prefix)

    def route(t: int) -> list[tuple[int, Tensor]]:
        scores = SCORES[f.score](w["gate.weight"] @ x[t])
        chosen = w["gate.tid2eid"][whole.ids[t]].tolist()
        total = sum(scores[e] for e in chosen) + f.floor if f.normalise else 1.0
        return [(e, f.scale * scores[e] / total) for e in chosen]

    return moe.reference_with(facts.moe, w, x, whole, route)
