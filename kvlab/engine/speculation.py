"""What the engine asks of speculation: drafts before a step, a pick for each of their rows, and what came of them.

`kvlab.speculate` builds on the engine, so the engine knows it by these two shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from kvlab.schedule import Request, Step, Verified


class Speculator(Protocol):
    """Speculation attached to one engine."""

    def propose(self, running: Sequence[Request]) -> None:
        """Gives each running request its drafts for the next step."""

    def begin(self, step: Step) -> None:
        """Makes the copies of states that the step's drafts need; called before they are computed."""

    def pick(self, step: Step, logits: Tensor) -> Tensor:
        """A token for each wanted row of `logits` [R, vocab], int64 [R]: after the known tokens, and after each draft.

        It equals the draft that follows the row's token exactly where that draft is right. -1: no finite logits.
        """

    def settle(self, step: Step, picked: Sequence[int]) -> list[int | Verified | None]:
        """What each sampling chunk got, with every state taken back to its verified tokens."""

    def retain(self, request_ids: Iterable[str]) -> None:
        """Forgets all other requests."""


class Speculation(Protocol):
    """What `EngineOptions.speculation` holds; `kvlab.speculate.SpeculationOptions` is one.

    `keep_states`: states are copied before drafts are computed on top of them.
    """

    keep_states: bool

    def attach(self, engine: Any) -> Speculator:
        """Speculation for `engine`, whose cache, runner and storage are there already."""
