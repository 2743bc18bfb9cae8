"""How many tokens to draft: a fixed number, or the one that the acceptance seen so far makes worth most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression


@dataclass
class Acceptance:
    """What came of the drafts of one request, or of all.

    Attributes:
        steps: steps with drafts. drafted, accepted: tokens. looked_at: drafts that were compared with the model's token; one
            behind a wrong one is not. rate: of these the share that was right, newer ones counting more.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    looked_at: int = 0
    rate: float = 0.7

    def note(self, drafted: int, accepted: int, memory: float = 0.9) -> None:
        """Counts a step in which `accepted` of `drafted` tokens were right."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.looked_at += accepted + (accepted < drafted)
        for right in [1] * accepted + [0] * (accepted < drafted):
            self.rate = memory * self.rate + (1 - memory) * right

    @property
    def right(self) -> float:
        """Of all drafts that were looked at, the share that was right: what `expected_tokens` takes as its rate."""
        return self.accepted / self.looked_at if self.looked_at else 0.0

    @property
    def mean_length(self) -> float:
        """Tokens that a step with drafts brought on average, the one picked after them included."""
        return 1 + self.accepted / self.steps if self.steps else 1.0


def expected_tokens(rate: float, count: int) -> float:
    """Tokens that a step with `count` drafts brings when each is right with probability `rate`: 1 + rate + rate^2 ..."""
    return sum(rate**i for i in range(count + 1))


def rate_of(tokens: float, count: int) -> float:
    """The rate at which a step with `count` drafts brings `tokens` tokens on average; `expected_tokens` turned around.

    Raises:
        ValueError: tokens that no rate gives, or count below 1.
    """
    if count < 1 or not 1 <= tokens <= count + 1:
        raise ValueError(f"tokens {tokens} at count {count}: must be from 1 to count + 1, with a count of at least 1")
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, count) < tokens else (low, middle)
    return (low + high) / 2


def speed(rate: float, count: int, cost: float, fixed: float = 0.0) -> float:
    """Tokens in the time of a step without drafts, in which none bring 1.

    Args:
        cost, fixed: of drafting and verifying one more token, and of having drafts at all, in steps without drafts.
    """
    return expected_tokens(rate, count) / (1 + fixed + count * cost) if count else 1.0


def best_count(rate: float, most: int, cost: float, fixed: float = 0.0) -> int:
    """The number of drafts, 0 to `most`, that brings most tokens per unit of time; `cost` and `fixed` as in `speed`."""
    return max(range(most + 1), key=lambda k: speed(rate, k, cost, fixed))


def fit_cost(counts: Sequence[int], costs: Sequence[float]) -> tuple[float, float]:
    """(cost of one more draft, fixed cost), fitted by least squares to what steps with `counts` drafts cost.

    Args:
        costs: of a whole step with drafts, in steps without: 1 + fixed + count * cost.

    Raises:
        ValueError: fewer than two different counts.
    """
    if len(set(counts)) < 2:
        raise ValueError(f"counts {tuple(counts)}: must be at least two different ones")
    line = linear_regression(counts, costs)
    return line.slope, line.intercept - 1
