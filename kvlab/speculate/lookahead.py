"""Lookahead decoding: the model drafts for itself, by guessing several tokens at once and correcting them each step.

A window of guesses stands behind the last known token. Every step computes it like any drafts, and the token that the
model puts after each guess is the next step's guess one place further (a Jacobi iteration). What three iterations say
along a diagonal is a run of tokens each of which the model put after the one before: such runs are kept, and those that
begin with the last known token are drafted. No second model, no cache; the price is the window's rows in every step.

Source: Fu et al. 2024, Lookahead decoding. It differs: the window is a chain that is verified too, and runs have three
tokens; where trees cannot branch a run takes the window's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvlab.schedule import Request, Step
from kvlab.speculate.draft import ROOT, Draft
from kvlab.speculate.options import SpeculationOptions
from kvlab.speculate.trees import can_branch

RUNS = 4
"""Runs kept for each first token, newest first."""


@dataclass
class Window:
    """Guesses by position: the newest and those of the iteration before; runs by their first token."""

    guess: dict[int, int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)
    runs: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    # where the window's drafts began among those of the current step, and the position of its first guess
    first: int = 0
    position: int = 0

    def keep(self, first: int, run: tuple[int, int]) -> None:
        """Puts a run of three tokens before the others of its first one."""
        others = [other for other in self.runs.get(first, []) if other != run]
        self.runs[first] = [run, *others][:RUNS]


class LookaheadProposer:
    """Drafts runs that the window has brought, and the window itself.

    Args:
        options: `k` is the number of drafts: half of them, at least two, are the window.
    """

    kv_bytes = 0

    def __init__(self, engine: Any, options: SpeculationOptions) -> None:
        self.branches = can_branch(engine)
        self.windows: dict[str, Window] = {}
        # the drafts of the current step, by request
        self._drafts: dict[str, Draft] = {}

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """A tree of runs and window for each request, or a chain of one of them."""
        self._drafts = {r.request_id: self._draft(r, n) for r, n in zip(requests, counts, strict=True)}
        return list(self._drafts.values())

    def observe(
        self, step: Step, hidden: Tensor | None, certain: Sequence[Sequence[int]], picked: Sequence[Sequence[int]]
    ) -> None:
        """Corrects each window by what the model put after its guesses."""
        for chunk, own in zip(step.chunks, picked, strict=True):
            window, draft = self.windows.get(chunk.request.request_id), self._drafts.get(chunk.request.request_id)
            if window is None or draft is None or len(own) < 2:
                continue
            first, position = window.first, window.position
            new: dict[int, int] = {}
            last = ROOT
            for i in range(first, len(own) - 1):
                # the window's guess i stands at `place`, and `own[i + 1]` came after it
                place, last = position + i - first, i
                new[place + 1] = own[i + 1]
                if (older := window.before.get(place - 1)) is not None:
                    window.keep(older, (draft.tokens[i], own[i + 1]))
            if last != ROOT:
                window.before, window.guess = dict(window.guess), window.guess | new

    def retain(self, request_ids: set[str]) -> None:
        """Forgets all other requests."""
        self.windows = {r: window for r, window in self.windows.items() if r in request_ids}

    def _draft(self, request: Request, count: int) -> Draft:
        window = self.windows.setdefault(request.request_id, Window())
        known = len(request.tokens)
        runs = window.runs.get(request.tokens[-1], [])
        width = max(min(2, count), count // 2) if self.branches or not runs else 0
        guesses = [window.guess.get(p, request.tokens[p % known]) for p in range(known, known + width)]
        window.guess |= dict(zip(range(known, known + width), guesses, strict=True))
        tokens: list[int] = []
        parents: list[int] = []
        for run in runs[: (count - width) // 2] if self.branches else [tuple(r)[:count] for r in runs[:1]]:
            for i, token in enumerate(run):
                parents.append(len(tokens) - 1 if i else ROOT)
                tokens.append(token)
        window.first, window.position = len(tokens), known
        for i, token in enumerate(guesses):
            parents.append(len(tokens) - 1 if i else ROOT)
            tokens.append(token)
        return Draft(tuple(tokens), tuple(parents))
