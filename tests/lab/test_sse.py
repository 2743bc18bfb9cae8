"""Events of a streamed answer, whatever characters their text has and wherever the network cuts them."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
import uvicorn

from kvlab.lab.sse import CONNECTIONS, events

BREAKS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"


def read(pieces: list[bytes]) -> list[dict]:
    async def stream():
        for piece in pieces:
            yield piece

    async def collect() -> list[dict]:
        return [event async for event in events(httpx.Response(200, content=stream()))]

    return asyncio.run(collect())


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("escaped", [True, False])
def test_every_kind_of_line_break_in_a_text_survives(size: int, escaped: bool) -> None:
    texts = [f"a{c}b" for c in BREAKS] + [BREAKS, "\u00fc\u4e2d\U0001f600"]
    body = "".join(f"data: {json.dumps({'text': t}, ensure_ascii=escaped)}\n\n" for t in texts) + "data: [DONE]\n\n"
    raw = body.encode()
    assert [e["text"] for e in read([raw[i : i + size] for i in range(0, len(raw), size)])] == texts


def test_other_lines_are_no_events_and_spaces_are_optional() -> None:
    raw = b': ping\r\nevent: x\r\ndata:{"a": 1}\r\n\r\ndata: {"a": 2}\n\ndata: [DONE]\n\ndata: {"a": 3}\n\n'
    assert read([raw]) == [{"a": 1}, {"a": 2}]
    assert read([b'data: {"a": 1}']) == [{"a": 1}]


@pytest.mark.parametrize("bad", [b'data: {"a": \n\n', b"data: 3\n\n"])
def test_what_is_no_object_is_an_error(bad: bytes) -> None:
    with pytest.raises(ValueError):
        read([bad])


def test_an_idle_connection_is_closed_here_before_servers_close_it() -> None:
    """Else a request that leaves as the server gives its connection up ends with a read error, once in a long run."""
    assert 0 < CONNECTIONS.keepalive_expiry < uvicorn.Config("app").timeout_keep_alive
    assert CONNECTIONS.max_connections is None
