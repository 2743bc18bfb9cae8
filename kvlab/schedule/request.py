"""A request: its tokens in one array, how many are computed, and how its next token is picked."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are picked, and when it ends.

    Attributes:
        max_tokens: new tokens at most.
        temperature: 0 is greedy.
        top_k: only the k likeliest tokens; 0 is all.
        top_p: only the likeliest tokens that together reach this probability; 1 is all.
        seed: equal seeds give equal tokens, whatever else is in the batch; None lets the engine choose.
        stop_token_ids: tokens that end the request, kept in its output.
        ignore_eos: go on after the model's own end token.

    Raises:
        ValueError: a value out of its range.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if not (isinstance(value, int) or (name == "seed" and value is None)):
                raise ValueError(f"{name} {value!r}: must be a whole number")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens {self.max_tokens}: must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature {self.temperature}: must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k}: must be 0 (all tokens) or positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: must be above 0 and at most 1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed {self.seed}: must be at least 0 and below 2**63")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))


class Request:
    """One sequence on its way through the engine.

    Invariant: 0 <= num_computed < len(tokens) while it is alive; the last token is known but not in the cache.

    Args:
        fields: any of priority, salt, adapter, media and arrival, by name.

    Raises:
        ValueError: a field of another name.

    Attributes:
        priority: lower runs first where the policy looks at priorities.
        salt: of the tenant; requests of different salts share no cached page.
        adapter: name and digest of the adapter that runs on top of the model; "" is the model itself.
        media: digests of what is not text; part of what makes two prefixes equal.
        arrival: when it was asked for, in the seconds that the scheduler's `now` counts.
        number: the how-manieth to arrive at its scheduler.
        preemptions: how often it has lost its pages.
        tokens: prompt and output, 32-bit ids in one array.
        num_prompt: how many of them are the prompt.
        num_computed: tokens whose keys and values are in the cache.
        max_total: length at which it ends; the scheduler clamps it to the model's length.
        drafts: tokens that may follow, proposed for the next step; never part of `tokens` before they are verified.
        finish_reason: one of `FINISH_REASONS` once it has ended, else None.
        error: why, when the finish reason is "error".
    """

    def __init__(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, stop_ids: Iterable[int] = (), **fields
    ) -> None:
        self.request_id = request_id
        self.tokens: array[int] = array("i", prompt)
        self.num_prompt = len(self.tokens)
        self.params = params
        self.stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else stop_ids)
        self.num_computed = 0
        self.max_total = self.num_prompt + params.max_tokens
        self.drafts: tuple[int, ...] = ()
        self.finish_reason: str | None = None
        self.error = ""
        self.priority: int = fields.pop("priority", 0)
        self.salt: str = fields.pop("salt", "")
        self.adapter: str = fields.pop("adapter", "")
        self.media: tuple[str, ...] = tuple(fields.pop("media", ()))
        _encodes("salt", self.salt)
        _encodes("adapter", self.adapter)
        self.arrival: float = fields.pop("arrival", 0.0)
        self.number = self.preemptions = 0
        if fields:
            raise ValueError(f"{min(fields)}: a request has no field of that name")

    @property
    def output(self) -> list[int]:
        """The new tokens."""
        return self.tokens[self.num_prompt :].tolist()

    @property
    def num_missing(self) -> int:
        """Known tokens that are not in the cache."""
        return len(self.tokens) - self.num_computed

    def ends_with(self, token: int) -> str | None:
        """The finish reason that `token`, just appended, brings; None when the request goes on."""
        if token in self.stop_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.max_total else None

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.num_computed} of {len(self.tokens)} computed)"


def _encodes(name: str, text: str) -> None:
    """Refuses what keys of pages could not be made of, before a step meets it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} {text!r}: must be text that UTF-8 can hold") from None
