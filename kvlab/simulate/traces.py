"""A trace: when each request came, how long it was, which prefix blocks it shares.

Equal hash ids are equal prefix blocks, the last block of a prompt may be partial. Files are read by
`kvlab.simulate.trace_files`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

LONGEST = 2**24
"""Tokens of a prompt or an answer; beyond any model's length, and they are all laid out in memory."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival_s: seconds after the trace's first request.
        prompt_tokens, output_tokens: its lengths.
        hash_ids: one per started block of the prompt; () where the trace says nothing about sharing.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival.

    Attributes:
        name: file or recipe.
        kind: which format.
        block_tokens: tokens that one hash id stands for.
        timed: whether arrivals are the trace's own; False: all are 0 until `arriving`.
        skipped: rows left out, by reason.
    """

    name: str
    kind: str
    requests: tuple[TraceRequest, ...]
    block_tokens: int = 512
    timed: bool = True
    skipped: tuple[tuple[str, int], ...] = ()

    def head(self, count: int) -> Trace:
        """The first `count` requests."""
        if count < 1:
            raise ValueError(f"limit {count}: must be at least 1")
        return replace(self, requests=self.requests[:count])

    def faster(self, speed: float) -> Trace:
        """The same requests with all gaps divided by `speed`."""
        if not 1e-9 <= speed <= 1e9:
            raise ValueError(f"speed {speed}: must be from 1e-9 to 1e9")
        return replace(self, requests=tuple(replace(r, arrival_s=r.arrival_s / speed) for r in self.requests))

    def arriving(self, arrivals: Iterable[float]) -> Trace:
        """The same requests at these seconds."""
        pairs = zip(self.requests, arrivals, strict=True)
        return replace(self, requests=tuple(replace(r, arrival_s=t) for r, t in pairs), timed=True)

    def clipped(self, tokens: int) -> Trace:
        """The same requests, none longer than `tokens` in and out: the prompt loses its end first.

        Each keeps a token of prompt and one of output.
        """
        if tokens < 2:
            raise ValueError(f"clip {tokens}: must be at least 2, a token in and one out")
        return replace(self, requests=tuple(_clipped(r, tokens, self.block_tokens) for r in self.requests))

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    @property
    def shared_blocks(self) -> tuple[int, int]:
        """(blocks seen in an earlier request or earlier in the same, all blocks): what an unlimited cache could hit."""
        seen: set[int] = set()
        again = total = 0
        for request in self.requests:
            for block in request.hash_ids:
                again += block in seen
                seen.add(block)
            total += len(request.hash_ids)
        return again, total


def _clipped(request: TraceRequest, tokens: int, block: int) -> TraceRequest:
    if request.prompt_tokens + request.output_tokens <= tokens:
        return request
    output = min(request.output_tokens, tokens - 1)
    prompt = min(request.prompt_tokens, tokens - output)
    return replace(
        request, prompt_tokens=prompt, output_tokens=output, hash_ids=request.hash_ids[: math.ceil(prompt / block)]
    )
