"""How an engine speculates: the field `speculation` of `kvlab.engine.options.EngineOptions`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab.models.load import LoadedModel
    from kvlab.speculate.draft import Proposer
    from kvlab.speculate.speculator import Speculator

METHODS = ("ngram", "draft", "lookahead", "medusa", "eagle")


@dataclass(frozen=True)
class SpeculationOptions:
    """How tokens are drafted.

    Attributes:
        method: one of `METHODS`, or a function that makes a proposer for an engine.
        k: drafts a step, at most.
        adapt: k follows what was accepted of each request's drafts.
        cost, fixed_cost: of one more draft, and of drafting at all, in steps without drafts; what `adapt` weighs against the
            tokens that drafts may bring.
        draft: for "draft": the model that drafts, of the same vocabulary (see `kvlab.speculate.skip.skip_layers`).
        heads: for "medusa" and "eagle": the file of trained heads, None for those of the default model.
        branches: children of each node of a draft tree by depth, as (3, 2, 1); () drafts chains.
        drawn: drafts of models are drawn from their distribution, else its likeliest token is taken. Greedy requests
            always take the likeliest.
        keep_states: recurrent states are copied before drafts are computed on top of them.
        longest: for "ngram" and "lookahead": tokens that are looked for.

    Raises:
        ValueError: a value out of its range.
    """

    method: str | Callable[[Any], Proposer] = "ngram"
    k: int = 4
    adapt: bool = False
    cost: float = 0.1
    draft: LoadedModel | None = None
    heads: str | None = None
    branches: tuple[int, ...] = ()
    drawn: bool = True
    keep_states: bool = True
    longest: int = 3
    fixed_cost: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.method, str) and self.method not in METHODS:
            raise ValueError(f"method {self.method!r}: must be one of {', '.join(METHODS)}")
        if self.k < 1:
            raise ValueError(f"k {self.k}: must be at least 1")
        for name in ("cost", "fixed_cost"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)}: must not be negative")
        if (self.method == "draft") != (self.draft is not None):
            raise ValueError("draft: method 'draft' needs a model that drafts, and no other method has one")
        if any(n < 1 for n in self.branches):
            raise ValueError(f"branches {self.branches}: each depth must have at least 1 child")

    def attach(self, engine: Any) -> Speculator:
        """Speculation for `engine`.

        Raises:
            ValueError: states that are not kept, a drafting model that does not fit, trees where parts cannot branch.
        """
        from kvlab.speculate.speculator import Speculator

        return Speculator(engine, self)
