"""What a step is made of: the limits it keeps to, the chunks it computes, what its requests got."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvlab.schedule.request import Request


@dataclass(frozen=True)
class Limits:
    """What one step and one sequence may take.

    Attributes:
        max_num_seqs: requests that run at once.
        max_batched_tokens: tokens of one step over all requests.
        max_model_len: prompt and output of one request.
    """

    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1")


class Chunk(NamedTuple):
    """`count` tokens of a request from position `start` on, the last ones of them `drafts`.

    `samples`: its last row picks the next token, and so does the row before each draft. `keeps_state`: a copy of the
    state after it is to be kept. `epoch`: how often the request had been preempted by then; what comes back of a chunk
    after a further time is void.
    """

    request: Request
    start: int
    count: int
    samples: bool
    keeps_state: bool = False
    drafts: tuple[int, ...] = ()
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward computes: chunks of exactly one token first, then the longer ones.

    No chunks at all: every request waits for pages that a copy is still reading or writing.
    """

    number: int
    chunks: tuple[Chunk, ...]

    @property
    def num_decodes(self) -> int:
        """How many chunks, the first ones, have exactly one token."""
        return sum(chunk.count == 1 for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        """Tokens over all chunks."""
        return sum(chunk.count for chunk in self.chunks)

    @property
    def sampling(self) -> list[Chunk]:
        """The chunks whose request gets a token, in the order of the batch."""
        return [chunk for chunk in self.chunks if chunk.samples]


class Verified(NamedTuple):
    """What a chunk with drafts came to: the drafts that were right and the token picked after them (None: its logits
    were not finite), and how many tokens of the request now count as computed."""

    tokens: tuple[int | None, ...]
    computed: int


class Output(NamedTuple):
    """A request's new token (None when it ended without one) and, at its end, the finish reason."""

    request_id: str
    token_id: int | None
    finish_reason: str | None = None
