"""A request followed while it runs: its tokens and text piece by piece, also when it is cut back on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvlab.schedule import Request


@dataclass(frozen=True)
class Piece:
    """A streamed token, the text it completes, and the finish reason with the last; no token on abort and error."""

    token_id: int | None
    text: str
    finish_reason: str | None


class Follower:
    """One reader of one request.

    Args:
        request: alive, or just ended.
        tokenizer: the model's, or None: no text then.
        step: takes the engine one step on.
        abort: ends the request of an id.
    """

    def __init__(
        self, request: Request, tokenizer: Any, step: Callable[[], object], abort: Callable[[str], object]
    ) -> None:
        self.request, self._tokenizer, self._step, self._abort = request, tokenizer, step, abort
        self._sent = request.num_prompt
        self._text = None if tokenizer is None else tokenizer.stream()

    def pieces(self) -> Iterator[Piece]:
        """The pieces as they come; leaving early aborts the request."""
        request = self.request
        try:
            while self._sent < len(request.tokens) or not request.finish_reason:
                # a step of another follower may have brought tokens already
                if self._sent == len(request.tokens):
                    self._step()
                    continue
                token, text = request.tokens[self._sent], self._text
                self._sent += 1
                ended = request.finish_reason in ("stop", "length") and self._sent == len(request.tokens)
                piece = text.push(token) + (text.finish() if ended else "") if text else ""
                yield Piece(token, piece, request.finish_reason if ended else None)
            if request.finish_reason in ("abort", "error"):
                yield Piece(None, self._text.finish() if self._text else "", request.finish_reason)
        finally:
            self._abort(request.request_id)

    def cut(self, tokens: int) -> None:
        """Goes on behind the request's first `tokens` tokens, where more were read: they and their text are void."""
        if tokens >= self._sent:
            return
        self._sent = tokens
        if self._tokenizer is not None:
            self._text = self._tokenizer.stream()
            for token in self.request.tokens[self.request.num_prompt : tokens]:
                self._text.push(token)
