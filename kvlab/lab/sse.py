"""Server-sent events of an OpenAI-compatible answer, and the connections to read them by.

Lines end at line feeds only. A client that splits where Python's `str.splitlines` does, as httpx' `aiter_lines`, breaks
the JSON of any text with a form feed, U+0085 or U+2028 in it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

CONNECTIONS = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
"""As many as there are requests. Idle ones are closed here first: a server that closes them (uvicorn: after 5 s) may do
so just as one is used again, which would count as its failure."""


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The object of each event of `answer`, up to `[DONE]`, the last even if the stream ends in its line.

    Raises:
        ValueError: an event that is no JSON object.

    Source: the HTML standard, section 9.2.6, less events of several lines, which no such server sends.
    """
    rest, over = b"", False
    async for piece in answer.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = _data(line)
            # read to the end even so: a connection whose answer was read whole can be used again
            over = over or data == b"[DONE]"
            if data and not over:
                yield _object(data)
    if (data := _data(rest)) and not over and data != b"[DONE]":
        yield _object(data)


def _data(line: bytes) -> bytes:
    return line[5:].strip() if line.startswith(b"data:") else b""


def _object(data: bytes) -> dict[str, Any]:
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError(f"event {data[:40]!r}: must be a JSON object")
    return found
