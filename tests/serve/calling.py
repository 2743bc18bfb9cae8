"""What tests of the server share: the official client of a server, what an engine says alone, a slow engine."""

from __future__ import annotations

import os
import time
import urllib.request

import openai
import speaking

from kvlab.engine import SamplingParams


def client_of(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def alone(prompt: list[int], **params) -> list[int]:
    """The tokens of an engine that serves nothing else."""
    return speaking.engine().generate([prompt], SamplingParams(**params))[0].token_ids


def words(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def idle(server) -> None:
    end = time.monotonic() + 10
    while server.service.loop.num_live or server.service.engine.cache.held_bytes:
        assert time.monotonic() < end, "requests or pages are left"
        time.sleep(0.01)


def slowed(engine, seconds: float = 0.01):
    """The engine with steps long enough for a client to do something in between."""
    step = engine.step

    def slow():
        time.sleep(seconds)
        return step()

    engine.step = slow
    return engine


def scrape(server) -> str:
    return urllib.request.urlopen(f"{server.url}/metrics").read().decode()


def environment() -> dict[str, str]:
    return os.environ | {"KVLAB_OPS": "reference", "OMP_NUM_THREADS": "1"}
