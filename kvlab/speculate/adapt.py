"""How many tokens to draft: a fixed number, or the one that the acceptance seen so far makes worth most."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Acceptance:
    """What came of the drafts of one request, or of all.

    Attributes:
        steps: steps with drafts. drafted, accepted: tokens. rate: of the drafts that were looked at, the share that was
            right, newer ones counting more; a draft behind a wrong one is not looked at.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    rate: float = 0.7

    def note(self, drafted: int, accepted: int, memory: float = 0.9) -> None:
        """Counts a step in which `accepted` of `drafted` tokens were right."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        for right in [1] * accepted + [0] * (accepted < drafted):
            self.rate = memory * self.rate + (1 - memory) * right

    @property
    def mean_length(self) -> float:
        """Tokens that a step with drafts brought on average, the one picked after them included."""
        return 1 + self.accepted / self.steps if self.steps else 1.0


def expected_tokens(rate: float, count: int) -> float:
    """Tokens that a step with `count` drafts brings when each is right with probability `rate`: 1 + rate + rate^2 ..."""
    return sum(rate**i for i in range(count + 1))


def best_count(rate: float, most: int, cost: float) -> int:
    """The number of drafts, 0 to `most`, that brings most tokens per unit of time.

    Args:
        cost: of drafting and verifying one more token, in steps without drafts.
    """
    return max(range(most + 1), key=lambda k: expected_tokens(rate, k) / (1 + k * cost))
