"""Prompt lookup: what followed the last time the same few tokens stood there. No model, no cache.

Source: Saxena 2023, prompt lookup decoding. Texts that repeat themselves (code, quotes, summaries) are drafted well.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvlab.schedule import Request
from kvlab.speculate.draft import Draft, Stateless


class NGramProposer(Stateless):
    """Drafts from the request's own tokens.

    Args:
        longest: the longest run of last tokens that is looked for first. shortest: the last one tried.

    Raises:
        ValueError: lengths below 1, or in the wrong order.
    """

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"shortest {shortest}, longest {longest}: must be at least 1 and in this order")
        self.longest, self.shortest = longest, shortest

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """A draft for each request; empty where its last token stands nowhere else."""
        return [Draft(self.lookup(r.tokens, n)) for r, n in zip(requests, counts, strict=True)]

    def lookup(self, tokens: array[int], count: int) -> tuple[int, ...]:
        """The `count` tokens that followed the newest earlier place of the last tokens; () when there is none.

        A place so near the end that too few tokens followed is continued with what it has just drafted.
        """
        data = tokens.tobytes()
        for length in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            start = _find_last(data, tokens.itemsize, length)
            if start >= 0:
                found = list(tokens[start:])
                for i in range(count):
                    found.append(found[i])
                return tuple(found[:count])
        return ()


def _find_last(data: bytes, width: int, length: int) -> int:
    """The index behind the newest earlier place of the last `length` items of `data`; -1 when there is none."""
    pattern, end = data[-length * width :], len(data) - width
    at = data.rfind(pattern, 0, end)
    while at >= 0 and at % width:
        at = data.rfind(pattern, 0, at + len(pattern) - 1)
    return at // width + length if at >= 0 else -1
