"""The four metrics of a server, live: read from any /metrics endpoint with vLLM's names, kvlab's or a vLLM's own.

with Watch(url) as watch:        looks at the endpoint every 100 ms, in a thread
    ...                          traffic
four(watch.looks[0], watch.looks[-1])
show_looks(watch.looks)          figures and a table, which stay readable without a kernel
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from kvlab.book.plots import new_figure, show
from kvlab.book.session import table
from kvlab.lab.scrape import Scrape, difference, grown, quantile, scrape

USAGE, RUNNING, WAITING = "vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"
PREEMPTIONS, HITS = "vllm:num_preemptions_total", "vllm:prefix_cache_hits_total"
QUERIES, TTFT = "vllm:prefix_cache_queries_total", "vllm:time_to_first_token_seconds"
TTFT_BY_CONTEXT = "kvlab:time_to_first_token_seconds"


@dataclass(frozen=True)
class Tail:
    """Times to the first token of the requests of one context bucket, as a histogram tells them: seconds."""

    count: int
    p50: float
    p95: float


@dataclass(frozen=True)
class Four:
    """The guide's four metrics between two looks; None where the endpoint does not tell.

    Attributes:
        usage: share of the pool that requests hold, at the later look; of several engines the mean.
        evictions_per_s: preemptions per second.
        hit_rate: prompt tokens found over prompt tokens looked up.
        ttft: by context bucket ("all" first).
    """

    usage: float | None
    evictions_per_s: float | None
    hit_rate: float | None
    ttft: dict[str, Tail] = field(default_factory=dict)


def four(before: Scrape | None, after: Scrape) -> Four:
    """The four metrics of what happened between two looks; of everything so far without an earlier one."""
    preemptions, hits, queries = (grown(before, after, name) for name in (PREEMPTIONS, HITS, QUERIES))
    seconds = after.at - before.at if before else 0.0
    found = {"all": _tail(difference(before, after, TTFT))}
    for context in sorted(after.values(f"{TTFT_BY_CONTEXT}_count", "context"), key=_first_number):
        found[context] = _tail(difference(before, after, TTFT_BY_CONTEXT, context=context))
    return Four(
        after.mean(USAGE),
        preemptions / seconds if preemptions is not None and seconds > 0 else None,
        hits / queries if hits is not None and queries else None,
        {name: tail for name, tail in found.items() if tail},
    )


def _tail(buckets: list[tuple[float, float]]) -> Tail | None:
    p50, p95 = quantile(buckets, 0.5), quantile(buckets, 0.95)
    return None if p50 is None or p95 is None else Tail(round(buckets[-1][1]), p50, p95)


def _first_number(context: str) -> int:
    return int(context.split("-")[0].rstrip("+"))


class Watch:
    """Looks at an endpoint again and again in a thread, for the length of a `with` block.

    Args:
        url: of the endpoint or its server. every: seconds between two looks.

    Attributes:
        looks: so far, oldest first.
        missed: looks to which nobody answered.
    """

    def __init__(self, url: str, every: float = 0.1) -> None:
        self._url, self._every, self._end = url, every, threading.Event()
        self.looks: list[Scrape] = []
        self.missed = 0
        self._thread = threading.Thread(target=self._run, name="kvlab-watch", daemon=True)

    def _run(self) -> None:
        while True:
            try:
                self.looks.append(scrape(self._url))
            except (OSError, ValueError):
                # nobody answers, or a proxy says so in its own words
                self.missed += 1
            if self._end.wait(self._every):
                return

    def __enter__(self) -> Watch:
        # the first look is before anything that the block does
        self.looks.append(scrape(self._url))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        self.looks.append(scrape(self._url))


def series(looks: Sequence[Scrape], name: str) -> list[float | None]:
    """The values of a gauge at the looks: over the engines of an endpoint the sum, of a share the mean."""
    return [look.mean(name) if name == USAGE else look.total(name) for look in looks]


def rates(looks: Sequence[Scrape], name: str) -> list[float | None]:
    """Growth per second of a counter from each look to the next."""
    pairs = itertools.pairwise(looks)
    return [None if (n := grown(a, b, name)) is None else n / max(b.at - a.at, 1e-9) for a, b in pairs]


def show_four(found: Four, caption: str) -> None:
    """The four metrics as a table."""
    rows = [
        ("KV cache utilization", _percent(found.usage)),
        ("Eviction rate", "not told" if found.evictions_per_s is None else f"{found.evictions_per_s:.2f} per s"),
        ("Prefix cache hit rate", _percent(found.hit_rate)),
    ]
    for context, tail in found.ttft.items():
        name = "all prompts" if context == "all" else f"prompts of {context} tokens"
        rows.append(
            (f"First-token latency, {name}", f"P50 {tail.p50:.3g} s, P95 {tail.p95:.3g} s ({tail.count} requests)")
        )
    table(rows, ("metric", "value"), caption=caption)


def show_looks(looks: Sequence[Scrape], caption: str) -> None:
    """Two figures over time: the share of the pool that is held, and who runs and who waits."""
    seconds = [look.at - looks[0].at for look in looks]
    usage = new_figure("seconds", "pool held by requests, %", height=260)
    usage.add_scatter(x=seconds, y=[None if v is None else 100 * v for v in series(looks, USAGE)], name="held")
    usage.update_yaxes(range=[0, 105])
    show(usage, alt="Share of the pool held by requests over time", caption=f"{USAGE}. {caption}")
    queue = new_figure("seconds", "requests", height=260)
    for name, label, dash in ((RUNNING, "running", "solid"), (WAITING, "waiting", "dash")):
        queue.add_scatter(x=seconds, y=series(looks, name), name=label, line={"dash": dash, "shape": "hv"})
    queue.update_layout(showlegend=True, legend={"orientation": "h", "y": 1.15})
    show(queue, alt="Requests running and waiting over time", caption=f"{RUNNING}, {WAITING}. {caption}")


def _percent(value: float | None) -> str:
    return "not told" if value is None else f"{100 * value:.1f} %"


def live(url: str, seconds: float = 60.0, every: float = 1.0) -> list[Scrape]:
    """The dashboard of the endpoint at `url`, drawn anew every `every` seconds; what was looked at.

    In a build it looks twice and draws once.

    Raises:
        OSError: nobody answers there.
    """
    from IPython.display import clear_output

    looks = [scrape(url)]
    end = time.monotonic() + (2 * every if os.environ.get("KVLAB_BUILD") else seconds)
    while time.monotonic() < end:
        time.sleep(every)
        looks.append(scrape(url))
        if not os.environ.get("KVLAB_BUILD"):
            clear_output(wait=True)
            _draw(url, looks)
    if os.environ.get("KVLAB_BUILD"):
        _draw(url, looks)
    return looks


def _draw(url: str, looks: Sequence[Scrape]) -> None:
    span = f"{looks[-1].at - looks[0].at:.0f} s of {url}"
    show_four(four(looks[0], looks[-1]), f"The last {span}.")
    show_looks(looks, f"The last {span}.")
