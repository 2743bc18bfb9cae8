"""Counts of what generating N tokens costs one layer, with and without a cache. Exact, before anything is timed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepCounts:
    """Work of one attention layer over a whole generation.

    Attributes:
        projected: token positions whose key and value are computed.
        scored: query-key dot products per head.
        copied: cached positions moved because a buffer grew by concatenation (0 when preallocated).
    """

    projected: int
    scored: int
    copied: int = 0


def generation_counts(prompt: int, new: int, *, cached: bool, concatenates: bool = False) -> StepCounts:
    """Work of generating `new` tokens after a prompt of `prompt` tokens, in one layer.

    The first new token comes out of the pass over the prompt; each later one needs a step. Without a cache a step is a
    whole causal pass over everything so far; with one it projects one position and scores it against all.

    Raises:
        ValueError: prompt or new is not positive.
    """
    if prompt < 1 or new < 1:
        raise ValueError(f"prompt {prompt}, new {new}: both must be at least 1 token")
    first = _causal(prompt)
    lengths = range(prompt + 1, prompt + new)
    if not cached:
        return StepCounts(prompt + sum(lengths), first + sum(_causal(n) for n in lengths))
    copied = sum(n - 1 for n in lengths) if concatenates else 0
    return StepCounts(prompt + len(lengths), first + sum(lengths), copied)


def generation_pairs(prompt: int, new: int, *, cached: bool) -> list[list[tuple[int, int]]]:
    """The (query, key) positions whose dot product each pass computes: what `generation_counts` counts, one by one.

    Raises:
        ValueError: prompt or new is not positive.
    """
    generation_counts(prompt, new, cached=cached)
    passes = []
    for length in range(prompt, prompt + new):
        first = length - 1 if cached and length > prompt else 0
        passes.append([(query, key) for query in range(first, length) for key in range(query + 1)])
    return passes


def _causal(tokens: int) -> int:
    """Query-key pairs of a causal pass over `tokens` tokens."""
    return tokens * (tokens + 1) // 2
