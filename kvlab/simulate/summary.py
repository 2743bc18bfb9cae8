"""What a run of requests came to: percentiles per length bucket, goodput, hits, preemptions. Simulated or replayed."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

BUCKETS = (512, 2048, 8192, 32768)
"""Prompt tokens up to which a request belongs to a bucket; longer ones are in the last."""
PERCENTS = (50, 90, 99)


@dataclass
class Timed:
    """One request as it went.

    Attributes:
        prompt_tokens, output_tokens: asked for.
        arrival_s: when it came.
        token_s: when each token came.
        error: why it ended early; "" when it did not.
    """

    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    token_s: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.token_s[0] - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds per token after the first; 0 for a single token."""
        return (self.token_s[-1] - self.token_s[0]) / max(1, len(self.token_s) - 1)

    @property
    def e2e_s(self) -> float:
        """Seconds to the last token."""
        return self.token_s[-1] - self.arrival_s


@dataclass(frozen=True)
class Objective:
    """What a request must keep to count as good: seconds to the first token, mean seconds per token after it."""

    ttft_s: float = 2.0
    tpot_s: float = 0.1

    def kept_by(self, request: Timed) -> bool:
        """Whether it finished within both."""
        return bool(request.token_s) and request.ttft_s <= self.ttft_s and request.tpot_s <= self.tpot_s


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile of sorted values, linear between neighbours.

    Raises:
        ValueError: no values, or a percentage outside 0 .. 100.
    """
    if not ordered or not 0 <= percent <= 100:
        raise ValueError(f"percent {percent} of {len(ordered)} values: needs values, and 0 to 100")
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def bucket_of(prompt_tokens: int) -> str:
    """The length bucket of a prompt: "1-512", "513-2048", ..., "32769+"."""
    i = bisect.bisect_left(BUCKETS, prompt_tokens)
    low = BUCKETS[i - 1] + 1 if i else 1
    return f"{low}-{BUCKETS[i]}" if i < len(BUCKETS) else f"{low}+"


def latencies(requests: Sequence[Timed]) -> dict[str, Any] | None:
    """Percentiles in seconds of the requests that got tokens; None when none did."""
    served = [r for r in requests if r.token_s]
    if not served:
        return None
    values = {
        "ttft_s": sorted(r.ttft_s for r in served),
        "itl_s": sorted(b - a for r in served for a, b in zip(r.token_s, r.token_s[1:], strict=False)),
        "e2e_s": sorted(r.e2e_s for r in served),
    }
    found: dict[str, Any] = {"requests": len(served)}
    for name, ordered in values.items():
        found[name] = {f"p{p}": percentile(ordered, p) for p in PERCENTS} if ordered else None
    return found


def summary(requests: Sequence[Timed], objective: Objective) -> dict[str, Any]:
    """Everything that the requests' own times tell."""
    ended = [r for r in requests if not r.error and r.token_s]
    errors: dict[str, int] = {}
    for request in requests:
        if request.error:
            errors[request.error] = errors.get(request.error, 0) + 1
    last = max((r.token_s[-1] for r in requests if r.token_s), default=0.0)
    seconds = last - min((r.arrival_s for r in requests), default=0.0)
    tokens, good = sum(len(r.token_s) for r in requests), sum(map(objective.kept_by, ended))
    buckets = {bucket_of(n): [] for n in (1, *(b + 1 for b in BUCKETS))}
    for request in requests:
        buckets[bucket_of(request.prompt_tokens)].append(request)
    return {
        "requests": len(requests),
        "finished": len(ended),
        "errors": errors,
        "seconds": seconds,
        "prompt_tokens": sum(r.prompt_tokens for r in requests),
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / seconds if seconds > 0 else None,
        "requests_per_s": len(ended) / seconds if seconds > 0 else None,
        "objective": {"ttft_s": objective.ttft_s, "tpot_s": objective.tpot_s},
        "good_requests": good,
        "goodput_requests_per_s": good / seconds if seconds > 0 else None,
        "latency": {"all": latencies(requests)} | {name: latencies(own) for name, own in buckets.items() if own},
    }
