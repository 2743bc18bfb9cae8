"""The scheduling policy: who goes first, who gives way when pages run out, and what becomes of its pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlab.schedule.request import Request

ORDERS = ("fcfs", "priority", "longest_prefix")
VICTIMS = ("last", "priority", "least_progress", "cheapest")
PREEMPT = ("recompute", "swap", "auto")

Victim = Callable[[Sequence[Request]], Request]
"""Picks one of the requests that may give way, which it must not change. They come in the order in which they run."""


@dataclass(frozen=True)
class SwapCosts:
    """What it costs to have a preempted sequence back: its bytes over the link twice, or its tokens computed again.

    Attributes:
        link_bytes_per_s: between the pool and the memory below it, one direction.
        flops: operations per second that a prefill reaches.
        operations: operations of computing a sequence's first n tokens, as a function of n.
        latency_s: of starting one transfer.
    """

    link_bytes_per_s: float
    flops: float
    operations: Callable[[int], float]
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("link_bytes_per_s", "flops"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} {getattr(self, name)}: must be positive")

    def swap_s(self, num_bytes: int) -> float:
        """Seconds to move `num_bytes` out and in again."""
        return 2 * (self.latency_s + num_bytes / self.link_bytes_per_s)

    def recompute_s(self, tokens: int) -> float:
        """Seconds to compute `tokens` tokens again."""
        return self.operations(tokens) / self.flops


@dataclass(frozen=True)
class SchedulingPolicy:
    """Who goes first and who gives way.

    Attributes:
        order: of waiting requests. "fcfs": first come, first served. "priority": the lowest number first, then the
            order of arrival. "longest_prefix": the one that finds most of its prompt in the cache; those that were
            preempted go before it, and so does one that was passed over `patience` times.
        victim: whose pages are taken when they run out: the "last" arrived, the highest "priority" number, the one
            with the fewest new tokens ("least_progress"), the one that is "cheapest" to have back, or the one that a
            function picks (see `Victim`). Never the senior, which no function is shown: of the running requests the
            one that is first by priority (where the policy looks at it) and arrival. It runs first in each step, so it
            finishes; then another is senior.
        preempt: the victim's pages are dropped and computed again ("recompute"), or moved to the tier below where it
            has room ("swap"), or whichever is faster by `costs` ("auto").
        costs: what "auto" and "cheapest" compare by; "cheapest" without them counts tokens.
        patience: see `order`.

    Raises:
        ValueError: an unknown name, "auto" without costs, a negative patience.
    """

    order: str = "fcfs"
    victim: str | Victim = "last"
    preempt: str = "recompute"
    costs: SwapCosts | None = None
    patience: int = 16

    def __post_init__(self) -> None:
        for name, known in (("order", ORDERS), ("victim", VICTIMS), ("preempt", PREEMPT)):
            given = getattr(self, name)
            if given not in known and not (name == "victim" and callable(given)):
                also = ", or a function" if name == "victim" else ""
                raise ValueError(f"{name} {given!r}: must be one of {', '.join(known)}{also}")
        if self.preempt == "auto" and self.costs is None:
            raise ValueError("preempt 'auto': needs costs, the numbers by which it chooses")
        if self.patience < 0:
            raise ValueError(f"patience {self.patience}: must be 0 or positive")

    def rank(self, request: Request) -> tuple[int, int]:
        """Running requests are served, and the senior is found, in this order."""
        return (request.priority if "priority" in (self.order, self.victim) else 0, request.number)

    def choose(self, candidates: Sequence[Request]) -> tuple[Request, str]:
        """The victim among `candidates`, and why it; of equals the last arrived.

        Raises:
            ValueError: a function picked something else than one of them.
        """
        if callable(self.victim):
            return self._picked(self.victim, candidates)
        if self.victim == "priority":
            found = max(candidates, key=lambda r: (r.priority, r.number))
            return found, f"priority {found.priority}"
        if self.victim == "least_progress":
            found = min(candidates, key=lambda r: (len(r.tokens) - r.num_prompt, -r.number))
            return found, f"fewest new tokens, {len(found.tokens) - found.num_prompt}"
        if self.victim == "cheapest":
            costs = self.costs
            if costs is None:
                found = min(candidates, key=lambda r: (r.num_computed, -r.number))
                return found, f"fewest computed tokens, {found.num_computed}"
            found = min(candidates, key=lambda r: (costs.recompute_s(r.num_computed), -r.number))
            return found, f"cheapest to compute again, {1e3 * costs.recompute_s(found.num_computed):.3g} ms"
        return max(candidates, key=lambda r: r.number), ""

    @staticmethod
    def _picked(pick: Victim, candidates: Sequence[Request]) -> tuple[Request, str]:
        name = getattr(pick, "__name__", type(pick).__name__)
        # a list of its own: what the function does to it changes nothing
        found = pick(list(candidates))
        if not any(found is request for request in candidates):
            ids = ", ".join(request.request_id for request in candidates)
            raise ValueError(f"victim {name}: picked {found!r}, must pick one of the requests {ids}")
        return found, f"picked by {name}"


FIRST_COME = SchedulingPolicy()
"""The default: first come, first served; the last arrived gives way and computes its tokens again."""
