"""Open-loop load on `kvlab serve` until something gives: random prompts, cancels, a pool a tenth of the demand.

Watched: nothing leaks (pages, requests, threads), nothing stands still, memory stays flat, and one answer in twenty is
compared with a cold run of the same seed alone (in fp32 near ties may turn over: they are counted).
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from kvlab.engine import Engine, SamplingParams
from kvlab.lab.near_ties import first_difference
from kvlab.lab.sse import CONNECTIONS, events
from kvlab.serve.limits import ServerLimits
from kvlab.serve.server import ServerThread

STALL_S = 120.0
"""No token for so long while requests are alive is a deadlock."""
FLAT = 1.05
"""Memory in the last quarter of a run over memory in its second, both medians, at most."""


@dataclass(frozen=True)
class SoakOptions:
    """The load.

    Attributes:
        seconds: of arrivals. rate: requests per second. burst: most that come at once.
        cancels: share of requests whose client leaves early.
        compare: one completed answer in so many is computed again, alone and cold.
        prompt, output: longest lengths. prefixes: shared beginnings. seed: of everything.
    """

    seconds: float = 1800.0
    rate: float = 4.0
    burst: int = 16
    cancels: float = 0.2
    compare: int = 20
    prompt: int = 40
    output: int = 120
    prefixes: int = 4
    seed: int = 0


@dataclass
class Sent:
    """One request: what was asked, what came, how it ended."""

    prompt: list[int]
    output: int
    seed: int
    temperature: float
    token_ids: list[int] = field(default_factory=list)
    end: str = ""


@dataclass
class Soak:
    """A run over one engine.

    Args:
        fresh: makes a cold engine like the served one, for comparisons.
    """

    engine: Engine
    fresh: Callable[[], Engine]
    options: SoakOptions
    sent: list[Sent] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    peak: dict[str, int] = field(default_factory=lambda: {"running": 0, "waiting": 0})
    _tokens: tuple[int, float] = (0, 0.0)

    def run(self) -> dict[str, Any]:
        """What was found; "problems" is empty when nothing gave."""
        limits = ServerLimits(max_waiting=10_000, drain_s=5)
        with ServerThread(self.engine, limits) as server:
            asyncio.run(self._load(server))
            self._check_idle(server)
        growth = self._check_memory()
        compared, ties = self._compare()
        ends: dict[str, int] = {}
        for one in self.sent:
            ends[one.end] = ends.get(one.end, 0) + 1
        counts = self.engine.events.counts
        found = {"preemptions": counts["preempt"], "compared": compared}
        # a load that asks nothing of the server finds nothing
        self.problems += [f"{what} 0: the run shows nothing" for what, count in found.items() if not count]
        return {
            "seconds": self.options.seconds,
            "requests": len(self.sent),
            "ends": ends,
            **found,
            "near_ties": ties,
            "hits": counts.get("hit", 0),
            "peak": self.peak,
            "memory_growth": growth,
            "memory_bytes": [[round(at, 1), size] for at, size in self.memory[:: max(1, len(self.memory) // 60)]],
            "problems": self.problems,
        }

    async def _load(self, server: ServerThread) -> None:
        rng = random.Random(self.options.seed)
        vocab = self.engine.model.config.vocab_size
        shared = [[rng.randrange(vocab) for _ in range(self.options.prompt // 2)] for _ in range(self.options.prefixes)]
        timeout = httpx.Timeout(600)
        async with httpx.AsyncClient(base_url=server.url, timeout=timeout, limits=CONNECTIONS) as client:
            watch = asyncio.create_task(self._watch())
            start, tasks = time.monotonic(), set()
            while time.monotonic() - start < self.options.seconds and not self.problems:
                # bursts: pressure on a fast machine too
                count = rng.randint(1, self.options.burst)
                for _ in range(count):
                    tasks.add(task := asyncio.create_task(self._send(client, rng, shared, vocab)))
                    task.add_done_callback(tasks.discard)
                await asyncio.sleep(count * rng.expovariate(self.options.rate))
            await self._finish(tasks)
            watch.cancel()

    async def _finish(self, tasks: set[asyncio.Task]) -> None:
        """Waits until all have ended; those that a standstill keeps are given up."""
        while tasks and not self.problems:
            await asyncio.wait(tasks, timeout=1.0)
        for task in tasks:
            task.cancel()

    async def _send(self, client: httpx.AsyncClient, rng: random.Random, shared: list[list[int]], vocab: int) -> None:
        o = self.options
        prompt = rng.choice(shared) + [rng.randrange(vocab) for _ in range(rng.randint(1, o.prompt - o.prompt // 2))]
        one = Sent(prompt, rng.randint(1, o.output), rng.randrange(2**31), rng.choice((0.0, 1.0)))
        leaves = rng.randrange(one.output + 1) if rng.random() < o.cancels else None
        patience = rng.uniform(0, 2)
        self.sent.append(one)
        body = {
            "prompt": one.prompt, "max_tokens": one.output, "seed": one.seed, "temperature": one.temperature,
            "ignore_eos": True, "return_token_ids": True, "stream": True,
        }  # fmt: skip
        try:
            if leaves == 0:
                # leaves while it waits, perhaps before it ever ran
                await asyncio.wait_for(self._read(client, body, one, None), patience)
            else:
                await self._read(client, body, one, leaves)
        except TimeoutError:
            one.end = "left early"
        except (httpx.HTTPError, ValueError) as error:
            one.end = type(error).__name__
            self.problems.append(f"request {len(self.sent)}: {error!r}")

    async def _read(self, client: httpx.AsyncClient, body: dict, one: Sent, leaves: int | None) -> None:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                # nothing that is sent here may be turned away
                one.end = f"HTTP {answer.status_code}"
                self.problems.append(f"{one.end}: {(await answer.aread())[:200].decode(errors='replace')}")
                return
            async for data in events(answer):
                if "error" in data:
                    one.end = "error"
                    self.problems.append(f"answer: {data['error']['message']}")
                    return
                for choice in data["choices"]:
                    one.token_ids += choice["token_ids"]
                    one.end = choice["finish_reason"] or one.end
                if leaves is not None and len(one.token_ids) >= leaves and not one.end:
                    one.end = "left early"
                    return

    async def _watch(self) -> None:
        """Notes memory, how many run and wait, and whether tokens still come while requests are alive."""
        start = time.monotonic()
        while True:
            now, made = time.monotonic(), self.engine.events.counts["token"]
            self.memory.append((now - start, resident_bytes()))
            for name, most in self.peak.items():
                self.peak[name] = max(most, len(getattr(self.engine.scheduler, name)))
            if made != self._tokens[0] or not self.engine.requests:
                self._tokens = (made, now)
            elif now - self._tokens[1] > STALL_S:
                self.problems.append(
                    f"deadlock: {len(self.engine.requests)} requests alive, no token for {STALL_S:.0f} s"
                )
                return
            await asyncio.sleep(0.5)

    def _check_idle(self, server: ServerThread) -> None:
        """After the last answer nothing is held."""
        end = time.monotonic() + 30
        while (server.service.loop.num_live or self.engine.requests) and time.monotonic() < end:
            time.sleep(0.05)
        if server.service.loop.num_live or self.engine.requests:
            self.problems.append(
                f"leak: {server.service.loop.num_live} answers, {len(self.engine.requests)} requests left"
            )
        if self.engine.cache.held_bytes:
            self.problems.append(f"leak: {self.engine.cache.held_bytes} bytes of pages are held by nobody's request")
        self.engine.cache.check_invariants()

    def _check_memory(self) -> float | None:
        """Memory in the last quarter over memory in the second, medians; None for runs too short to tell."""
        gc.collect()
        sizes = [size for _, size in self.memory]
        quarter = len(sizes) // 4
        if quarter < 10 or not all(sizes):
            return None
        early, late = median(sizes[quarter : 2 * quarter]), median(sizes[-quarter:])
        if late > early * FLAT:
            self.problems.append(f"memory grew from {early:.0f} to {late:.0f} bytes")
        return round(late / early, 4)

    def _compare(self) -> tuple[int, int]:
        """How many answers were computed again, and how many of them differ by a near tie; more is a problem."""
        done = [one for one in self.sent if one.end in ("stop", "length")][:: self.options.compare]
        exact, ties = self.engine.model.dtype == "fp64", 0
        for one in done:
            params = SamplingParams(one.output, one.temperature, seed=one.seed, ignore_eos=True)
            gap = first_difference(self.fresh(), one.prompt, params, one.token_ids)
            # not below 1: NaN too
            if not gap < 1 or (exact and gap):
                self.problems.append(f"answer to seed {one.seed} differs from the one alone, {gap:.3g} near ties away")
            ties += 0 < gap < 1
        return len(done), ties


def resident_bytes() -> int:
    """Memory of this process now; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


def soak(model: Any, options: SoakOptions) -> dict[str, Any]:
    """A soak of `model`: a pool a tenth of what the load's running requests want, prefix cache on."""
    from kvlab.cache.prefix import PrefixOptions

    most, size = 40, 16
    longest = options.prompt + options.output
    demand = most * -(-longest // size)
    settings: dict[str, Any] = {"block_size": size, "max_model_len": longest, "max_batched_tokens": 64}
    engine = Engine(model, num_blocks=demand // 10 + 1, max_num_seqs=most, prefix=PrefixOptions(), **settings)

    def fresh() -> Engine:
        return Engine(model, num_blocks=demand, max_num_seqs=1, **settings)

    return Soak(engine, fresh, options).run()


def main() -> int:
    """`python -m kvlab.lab.soak [--seconds N] [--model M]`: prints the result; 1 when there are problems."""
    import argparse

    from kvlab.models.load import load_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--model", help="as kvlab serve; fp64 is exact (default: the default model)")
    parser.add_argument("--dtype", default="fp32")
    args = parser.parse_args()
    found = soak(load_model(args.model, args.dtype, "cpu"), SoakOptions(args.seconds, args.rate))
    print(json.dumps(found, indent=1))
    return int(bool(found["problems"]))


if __name__ == "__main__":
    raise SystemExit(main())
