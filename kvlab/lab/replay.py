"""A trace sent to a server as it happened: requests leave at their times, whether or not earlier ones were answered.

Works with any server that streams OpenAI's completions; what only /metrics knows (prefix hits, preemptions) is None
where there is none. Prompts are token ids made from the trace's hash ids, so that equal blocks are equal prefixes.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from kvlab.lab.scrape import Scrape, grown
from kvlab.lab.sse import CONNECTIONS, events
from kvlab.simulate.summary import Objective, Timed, summary
from kvlab.simulate.traces import Trace, TraceRequest

FIRST_ID = 10
"""Ids below are start, end and padding tokens in most vocabularies."""


@dataclass(frozen=True)
class ReplayOptions:
    """How a trace is sent.

    Attributes:
        url: of the server, with or without /v1.
        model: name to ask for; "" is the first that the server lists.
        vocab: token ids of prompts are below; None asks the server, or takes 10,000.
        plain: send OpenAI's fields alone, without ignore_eos and return_token_ids.
        seed: of prompts. timeout_s: for a whole answer.
        headers: to send along, such as an API key.
        objective: what makes a request good.
    """

    url: str
    model: str = ""
    vocab: int | None = None
    plain: bool = False
    seed: int = 0
    timeout_s: float = 600.0
    headers: dict[str, str] = field(default_factory=dict)
    objective: Objective = field(default_factory=Objective)

    def __post_init__(self) -> None:
        if not _is_address(self.url):
            raise ValueError(f"url {self.url!r}: must be an address such as http://127.0.0.1:8000")
        if self.vocab is not None and self.vocab <= FIRST_ID:
            raise ValueError(f"vocab {self.vocab}: must be above {FIRST_ID}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s {self.timeout_s}: must be a positive number of seconds")

    @property
    def base(self) -> str:
        """The server's address without /v1."""
        return self.url.rstrip("/").removesuffix("/v1")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        # a port that is no port
        return False


class Prompts:
    """Token ids of a trace's prompts: each hash id has its own random ids, and so has each prompt without any."""

    def __init__(self, vocab: int, block: int, seed: int) -> None:
        if vocab <= FIRST_ID:
            raise ValueError(f"vocab {vocab}: must be above {FIRST_ID}")
        self._vocab, self._block, self._seed = vocab, block, seed

    def ids(self, row: TraceRequest, index: int) -> list[int]:
        """The ids of a row's prompt."""
        if not row.hash_ids:
            return self._random(f"prompt {index}", row.prompt_tokens)
        found = [token for hash_id in row.hash_ids for token in self._random(f"block {hash_id}", self._block)]
        return found[: row.prompt_tokens]

    def _random(self, name: str, count: int) -> list[int]:
        rng = random.Random(f"{self._seed} {name}")
        return [rng.randrange(FIRST_ID, self._vocab) for _ in range(count)]


class Replay:
    """One replay.

    Args:
        progress: told (answered, sent, all) now and then.
    """

    def __init__(
        self, trace: Trace, options: ReplayOptions, progress: Callable[[int, int, int], object] | None = None
    ) -> None:
        if not trace.timed:
            raise ValueError(f"{trace.name}: has no arrival times; give a rate")
        self.trace, self.options, self._progress = trace, options, progress
        self.timed = [Timed(r.prompt_tokens, r.output_tokens, r.arrival_s) for r in trace.requests]
        self.late_s = 0.0
        self._sent = self._answered = 0

    async def run(self) -> dict[str, Any]:
        """What it came to: see `kvlab.simulate.summary`, and what the server's /metrics add.

        Raises:
            OSError: nobody answers at the address. ValueError: the server lists no model.
        """
        timeout = httpx.Timeout(self.options.timeout_s)
        async with httpx.AsyncClient(
            base_url=self.options.base, limits=CONNECTIONS, timeout=timeout, headers=self.options.headers
        ) as client:
            model, vocab = await self._model(client)
            # made before the clock starts: no prompt leaves late because another was being written
            prompts = Prompts(vocab, self.trace.block_tokens, self.options.seed)
            bodies = [self._body(model, prompts.ids(r, i), r) for i, r in enumerate(self.trace.requests)]
            before = await self._look(client)
            start = time.perf_counter()
            sends = [asyncio.create_task(self._send(client, i, body, start)) for i, body in enumerate(bodies)]
            await asyncio.gather(*sends)
            after = await self._look(client)
        return self._report(model, before, after)

    async def _model(self, client: httpx.AsyncClient) -> tuple[str, int]:
        try:
            answer = await client.get("/v1/models")
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise OSError(f"{self.options.base}: nobody answers ({error})") from None
        rows = answer.json().get("data", []) if answer.status_code == 200 else []
        row = next((r for r in rows if self.options.model in ("", r.get("id"))), {})
        name = self.options.model or row.get("id")
        if not name:
            raise ValueError(f"{self.options.base}: lists no model (HTTP {answer.status_code}); give its name")
        return name, self.options.vocab or row.get("vocab_size") or 10_000

    def _body(self, model: str, prompt: list[int], row: TraceRequest) -> bytes:
        body = {"model": model, "prompt": prompt, "max_tokens": row.output_tokens, "temperature": 0, "stream": True}
        more = {} if self.options.plain else {"ignore_eos": True, "return_token_ids": True}
        return json.dumps(body | more).encode()

    async def _send(self, client: httpx.AsyncClient, index: int, body: bytes, start: float) -> None:
        timed = self.timed[index]
        await asyncio.sleep(max(0.0, timed.arrival_s - (time.perf_counter() - start)))
        self.late_s = max(self.late_s, time.perf_counter() - start - timed.arrival_s)
        self._sent += 1
        try:
            headers = {"Content-Type": "application/json"}
            async with client.stream("POST", "/v1/completions", content=body, headers=headers) as answer:
                if answer.status_code != 200:
                    timed.error = f"HTTP {answer.status_code}"
                    return
                await self._read(answer, timed, start)
        except httpx.HTTPError as error:
            timed.error = type(error).__name__
        except ValueError as error:
            timed.error = str(error)[:80]
        finally:
            self._answered += 1
            if self._progress:
                self._progress(self._answered, self._sent, len(self.timed))

    async def _read(self, answer: httpx.Response, timed: Timed, start: float) -> None:
        async for data in events(answer):
            if "error" in data:
                timed.error = str(data["error"].get("message", data["error"]))[:80]
                return
            for choice in data.get("choices", ()):
                # a server that does not tell ids sends about a token a chunk
                count = len(choice["token_ids"]) if choice.get("token_ids") is not None else bool(choice.get("text"))
                timed.token_s.extend([time.perf_counter() - start] * count)

    async def _look(self, client: httpx.AsyncClient) -> Scrape | None:
        try:
            answer = await client.get("/metrics")
            return Scrape.of(answer.text) if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None

    def _report(self, model: str, before: Scrape | None, after: Scrape | None) -> dict[str, Any]:
        found = summary(self.timed, self.options.objective)

        def count(name: str) -> float | None:
            return grown(before, after, name) if after else None

        hits, queries = count("vllm:prefix_cache_hits_total"), count("vllm:prefix_cache_queries_total")
        facts = {
            "trace": self.trace.name,
            "kind": self.trace.kind,
            "skipped_rows": dict(self.trace.skipped),
            "url": self.options.base,
            "model": model,
            "seed": self.options.seed,
            "largest_delay_of_a_send_s": self.late_s,
        }
        return {
            "replayed": facts,
            **found,
            "prefix_hit_rate": hits / queries if hits is not None and queries else None,
            "hit_tokens": hits,
            "cached_tokens_by_source": _grown_by(before, after, "vllm:prompt_tokens_cached_by_source_total", "source"),
            "preemptions": count("vllm:num_preemptions_total"),
            "preempted_tokens": count("kvlab:preempted_tokens_total"),
        }


def _grown_by(before: Scrape | None, after: Scrape | None, name: str, label: str) -> dict[str, float] | None:
    """How much each series of a counter grew, by the value of one label; None where the server does not tell."""
    values = after.values(name, label) if after else {}
    return {value: grown(before, after, name, **{label: value}) or 0.0 for value in values} or None


def replay(
    trace: Trace, options: ReplayOptions, progress: Callable[[int, int, int], object] | None = None
) -> dict[str, Any]:
    """What the trace came to on a server: see `Replay`. In a thread of its own: a notebook has a loop running."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, Replay(trace, options, progress).run()).result()
