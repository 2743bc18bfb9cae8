"""A draft: tokens that may follow, as a chain or a tree; and what everyone who makes drafts offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvlab.schedule import Request, Step

ROOT = -1
"""The parent of drafts that follow the last known token."""


@dataclass(frozen=True, eq=False)
class Draft:
    """Tokens that may follow the last known one, parents before their children.

    Attributes:
        tokens: the drafts.
        parents: for each draft the index of the one before it, `ROOT` for the last known token; () is a chain.
        q: float64 [n, vocab], the distribution that each was drawn from; None where drafts were not drawn but chosen:
            all of the probability is on the token itself.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: Tensor | None = None

    def __post_init__(self) -> None:
        if self.parents and len(self.parents) != len(self.tokens):
            raise ValueError(f"parents {self.parents}: must be one for each of {len(self.tokens)} drafts")
        if any(not ROOT <= parent < i for i, parent in enumerate(self.parents)):
            raise ValueError(f"parents {self.parents}: each must come before its children")

    @property
    def is_tree(self) -> bool:
        """Whether some draft does not follow the one before it."""
        return any(parent != i - 1 for i, parent in enumerate(self.parents))

    def parent(self, i: int) -> int:
        """The index of the draft before draft `i`."""
        return self.parents[i] if self.parents else i - 1

    def depths(self, count: int) -> list[int]:
        """Places behind the last known token of the first `count` drafts: 1 for its children."""
        found: list[int] = []
        for i in range(count):
            parent = self.parent(i)
            found.append(1 if parent == ROOT else found[parent] + 1)
        return found


NO_DRAFT = Draft()


class Proposer(Protocol):
    """Makes drafts. Nothing it does can change what a request gets, only how soon."""

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """A draft of at most `counts[i]` tokens for each request, which all have a token to go on from."""

    def observe(
        self, step: Step, hidden: Tensor | None, certain: Sequence[Sequence[int]], picked: Sequence[Sequence[int]]
    ) -> None:
        """Hears what came of a step, before its requests are advanced.

        Args:
            hidden: what left the last layer [T, hidden].
            certain: for each chunk the rows of the batch that hold certain tokens, from its start on.
            picked: for each chunk the token that the model puts after its last known token and after each draft.
        """

    def retain(self, request_ids: set[str]) -> None:
        """Forgets all other requests."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of its own cache."""


class Stateless:
    """A proposer that keeps nothing between steps."""

    kv_bytes = 0

    def observe(
        self, step: Step, hidden: Tensor | None, certain: Sequence[Sequence[int]], picked: Sequence[Sequence[int]]
    ) -> None:
        """Learns nothing."""

    def retain(self, request_ids: set[str]) -> None:
        """Has nothing to forget."""
