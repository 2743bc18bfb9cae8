"""Clients that leave, servers that end and engines that fail, as the official `openai` client sees them."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import openai
import pytest
import speaking
from calling import client_of, idle, slowed

from kvlab.serve.limits import ServerLimits
from kvlab.serve.server import ServerThread


def test_client_that_leaves_a_stream_gives_its_pages_back():
    engine = slowed(speaking.engine())
    with ServerThread(engine) as server:
        ask = {"model": "tiny", "prompt": "w5", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
        stream = client_of(server).completions.create(**ask, stream=True)
        next(iter(stream))
        stream.close()
        idle(server)
        assert [e.reason for e in engine.events.of("finish")] == ["abort: asked for"]


def test_client_that_leaves_a_whole_answer_gives_its_pages_back():
    engine = slowed(speaking.engine())
    with ServerThread(engine) as server:
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=10)
        body = json.dumps({"prompt": "w5", "max_tokens": 200, "ignore_eos": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        while not engine.events.of("token"):
            time.sleep(0.01)
        connection.close()
        idle(server)
        assert [e.reason for e in engine.events.of("finish")] == ["abort: asked for"]


def test_shutdown_lets_answers_finish_and_takes_no_new_ones():
    engine = slowed(speaking.engine(), 0.005)
    server = ServerThread(engine, ServerLimits(drain_s=120)).start()
    client = client_of(server)
    ask = {"model": "tiny", "prompt": "w5", "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    stream = iter(client.completions.create(**ask, stream=True))
    first = next(stream)
    server._server.should_exit = True
    rest = list(stream)
    assert rest[-1].choices[0].finish_reason == "length"
    assert len(("".join(p.choices[0].text for p in [first, *rest])).split()) == 60
    server.stop()
    with pytest.raises(openai.APIConnectionError):
        client.completions.create(**ask)
    assert not server.service.loop.alive and not engine.requests


def test_shutdown_ends_answers_that_take_longer_than_the_drain():
    engine = slowed(speaking.engine(), 0.05)
    server = ServerThread(engine, ServerLimits(drain_s=1)).start()
    ask = {"model": "tiny", "prompt": "w5", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    stream = iter(client_of(server).completions.create(**ask, stream=True))
    next(stream)
    server.stop()
    assert not engine.requests and engine.cache.held_bytes == 0


def test_engine_that_fails_is_500_for_those_who_wait_and_503_from_then_on():
    engine = speaking.engine()
    engine.step = lambda: 1 / 0
    with ServerThread(engine) as server:
        client = client_of(server)
        with pytest.raises(openai.InternalServerError, match="division by zero"):
            client.completions.create(model="tiny", prompt="w5")
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model="tiny", prompt="w5")
        assert refused.value.status_code == 503
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{server.url}/health")
