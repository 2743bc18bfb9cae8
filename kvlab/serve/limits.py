"""What the server turns away, and with which status: 413 for what is too large, 429 for what comes while it is full."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

LONGEST = 2**40
"""Above every limit: an infinite one would stop what counts down from it."""


@dataclass(frozen=True)
class ServerLimits:
    """How much the server takes on.

    Attributes:
        max_waiting: requests beyond those that run; more get 429.
        max_choices: completions of one call: its prompts times n.
        max_body_bytes: of a call; more get 413.
        drain_s: seconds that answers under way have at shutdown.

    Raises:
        ValueError: a limit below its least value.
    """

    max_waiting: int = 256
    max_choices: int = 64
    max_body_bytes: int = 8 * 2**20
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        for name, least in (("max_waiting", 0), ("max_choices", 1), ("max_body_bytes", 1), ("drain_s", 0)):
            if not least <= getattr(self, name) < LONGEST:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least {least} and below {LONGEST:,}")


class Rejection(Exception):
    """A call that gets no answer: its HTTP status, OpenAI's error type and code, and the reason for people."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        # 429 says when to come again, 405 what there is
        self.headers = dict(headers or ({"Retry-After": "1"} if status == 429 else {}))

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI writes it."""
        kinds = {404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def too_long(message: str) -> Rejection:
    """413: a prompt or a request that no wait would make fit."""
    return Rejection(413, message, "context_length_exceeded", "prompt")


def invalid(message: str, param: str | None = None) -> Rejection:
    """400: a value out of its range, or something that this server does not do."""
    return Rejection(400, message, "invalid_value", param)


class BodyLimit:
    """ASGI middleware that answers 413 to bodies over a limit, whatever their Content-Length says.

    Args:
        refused: called for each.
    """

    def __init__(self, app: Any, max_bytes: int, refused: Callable[[], object] = lambda: None) -> None:
        self.app, self.max_bytes, self._refused = app, max_bytes, refused

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        """Counts what is received; the application never holds more than the limit."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.max_bytes:
            await self._refuse(send)
            return
        seen = 0

        async def counted() -> dict:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_bytes:
                raise ValueError("body over the limit")
            return message

        async def answered(message: dict) -> None:
            # whatever the application makes of a body that broke off, the answer is below
            if seen <= self.max_bytes:
                await send(message)

        await self.app(scope, counted, answered)
        if seen > self.max_bytes:
            await self._refuse(send)

    async def _refuse(self, send: Any) -> None:
        self._refused()
        error = Rejection(413, f"body: must be at most {self.max_bytes} bytes", "body_too_large")
        body = json.dumps(error.body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
