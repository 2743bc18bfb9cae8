"""Drafts for tests: those of a proposer that knows the answers, as chains and trees, and those of the real ones."""

from __future__ import annotations

from kvlab.speculate import Draft, SpeculationOptions
from kvlab.speculate.draft import Stateless

BRANCHING = ("full", "neighbours")
"""Kinds whose parts all take trees."""
DRAFTS_ITSELF = ("full", "windows", "latent", "indexed")
"""Kinds without states, as the model that drafts must be."""


class Teacher(Stateless):
    """Drafts what each request will say, by its id.

    Every other time it is wrong in one place; with `tree` a wrong branch stands before the right one. `wrong`: it is
    always wrong.
    """

    def __init__(self, answers: dict[str, list[int]], vocab: int, tree: bool = False, wrong: bool = False) -> None:
        self.answers, self.vocab, self.tree, self.wrong = answers, vocab, tree, wrong

    def propose(self, requests, counts):
        drafts = []
        for request, count in zip(requests, counts, strict=True):
            known, parents = len(request.output), ()
            tokens = self.answers[request.request_id][known : known + count]
            if tokens and (self.wrong or known % 2 == 1):
                # the first of them, as a step may have room for no more
                tokens[0] = (tokens[0] + 1) % self.vocab
            elif self.tree and len(tokens) > 1:
                tokens, parents = [(tokens[0] + 1) % self.vocab, *tokens[:-1]], (-1, -1, *range(1, len(tokens) - 1))
            drafts.append(Draft(tuple(tokens), parents))
        return drafts


def speculation(model, drafts: str, answers: dict[str, list[int]], k: int = 3, **options) -> SpeculationOptions:
    """Drafts of that sort, or the nearest that the kind can have: "right" (every other time), "wrong", "tree", "model"
    (the model itself), or another of `SpeculationOptions.method`."""
    tree = drafts == "tree" and model.name in BRANCHING
    if drafts in ("right", "wrong", "tree") or (drafts == "model" and model.name not in DRAFTS_ITSELF):
        return SpeculationOptions(lambda engine: Teacher(answers, model.vocab, tree, drafts == "wrong"), k=k)
    own = {"method": "draft", "draft": model.model, "drawn": False} if drafts == "model" else {"method": drafts}
    return SpeculationOptions(k=k, **own, **options)
