"""What the bookkeeping of prefix caching costs, in pure Python, against the bare sha256 chain in the same run.

A request of 8k tokens in pages of 16 is hashed, matched, given pages, put into the cache, and freed. Beside it the
chain alone: one sha256 over 32 + 64 bytes for each page. The pool is full: each new page takes an old one's place, and
that is part of "allocate". All times are microseconds of this thread a page, medians over repetitions that take both
sides in turn.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from array import array
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from kvlab.cache import KVCacheManager, PrefixOptions
from kvlab.lab.record import provenance
from kvlab.schedule import Request, SamplingParams
from kvlab.specs.formats import get_format
from kvlab.specs.layout import group_parts
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import Attention
from kvlab.specs.pools import lay_out

PAGE, TOKENS = 16, 8192
CACHED = (10_000, 100_000, 1_000_000)
PHASES = ("match", "allocate", "insert", "free")
TARGETS = {"hash against the bare chain": 4.0, "growth from 10,000 to 1,000,000 tokens": 1.5}


def manager(design: str, pages: int) -> KVCacheManager:
    """A manager of one group that keeps everything, with so many pages."""
    part = Attention(8, 128, 128, get_format("bf16"))
    groups = group_parts(ModelSpec("bench", "llama", (LayerSpec(0, (part,)),), 4096, 32, 32_000), PAGE)
    return KVCacheManager(lay_out(groups), [pages + 1], TOKENS, prefix=PrefixOptions(design))


def serve(cache: KVCacheManager, name: str, tokens: array[int]) -> dict[str, float]:
    """Seconds of each phase of a request that computes all its tokens and ends."""
    request, clock = Request(name, tokens, SamplingParams()), time.thread_time
    marks = [clock()]
    hit = cache.match(request)
    marks.append(clock())
    cache.allocate(name, hit.tokens, hit=hit)
    cache.allocate(name, len(tokens))
    marks.append(clock())
    cache.advance(name, len(tokens))
    marks.append(clock())
    cache.free(name)
    marks.append(clock())
    cache.forget(name)
    return {phase: after - before for phase, before, after in zip(PHASES, marks, marks[1:], strict=False)}


def bare_chain(tokens: array[int]) -> float:
    """Seconds of the digests alone."""
    start, parent = time.thread_time(), b"\0" * 32
    for at in range(0, len(tokens), PAGE):
        parent = sha256(parent + tokens[at : at + PAGE].tobytes()).digest()
    return time.thread_time() - start


def text(rng: random.Random, tokens: int = TOKENS) -> array[int]:
    """Random token ids."""
    return array("i", [rng.randrange(32_000) for _ in range(tokens)])


def run_bench(repeats: int = 9, cached: tuple[int, ...] = CACHED) -> dict[str, Any]:
    """The record: per design and per number of cached tokens the phases of new and of known prompts."""
    rng, rows, pages = random.Random(0), [], TOKENS // PAGE
    gc.disable()
    try:
        for design in ("hash", "radix"):
            for held in cached:
                rows.append(_measure(rng, design, held, repeats, pages))
    finally:
        gc.enable()
    return {"what": "Bookkeeping of prefix caching in pure Python"} | provenance("kvlab bench prefix --json", ()) | {
        "page_tokens": PAGE, "prompt_tokens": TOKENS, "repeats": repeats, "unit": "microseconds a page",
        "targets": TARGETS, "rows": rows, "ratios": ratios(rows),
    }  # fmt: skip


def _measure(rng: random.Random, design: str, held: int, repeats: int, pages: int) -> dict[str, Any]:
    cache = manager(design, held // PAGE + 2 * pages)
    for i in range(-(-held // TOKENS)):
        serve(cache, f"old {i}", text(rng, min(TOKENS, held - i * TOKENS)))
    new, known, bare = [], [], []
    for i in range(repeats):
        tokens = text(rng)
        bare.append(bare_chain(tokens))
        new.append(serve(cache, f"new {i}", tokens))
        known.append(serve(cache, f"known {i}", tokens))
    scale = 1e6 / pages
    row: dict[str, Any] = {"design": design, "cached_tokens": held, "bare": scale * statistics.median(bare)}
    for name, found in (("new", new), ("known", known)):
        row[name] = {phase: scale * statistics.median(one[phase] for one in found) for phase in PHASES}
        row[name]["total"] = scale * statistics.median(sum(one.values()) for one in found)
    return row


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What the targets are about: the whole bookkeeping over the bare chain, and its growth with what is cached."""
    found = {}
    for design in ("hash", "radix"):
        own = [row for row in rows if row["design"] == design]
        found[f"{design} against the bare chain"] = own[0]["new"]["total"] / own[0]["bare"]
        # each against the chain beside it: the machine's own speed may have changed between them
        found[f"{design} growth"] = (
            own[-1]["new"]["total"] / own[-1]["bare"] / found[f"{design} against the bare chain"]
        )
    return found


def report(record: dict[str, Any]) -> str:
    """The record for people."""
    lines = [f"microseconds a page of {PAGE} tokens, prompts of {TOKENS}; median of {record['repeats']}", ""]
    heads = "".join(f"{phase:>9}" for phase in (*PHASES, "total"))
    lines.append(f"{'design':7}{'cached':>10}{'bare':>7}  new: {heads}   known: match total")
    for row in record["rows"]:
        new = "".join(f"{row['new'][phase]:9.2f}" for phase in (*PHASES, "total"))
        known = f"{row['known']['match']:14.2f}{row['known']['total']:6.2f}"
        lines.append(f"{row['design']:7}{row['cached_tokens']:10,}{row['bare']:7.2f}       {new}{known}")
    lines += ["", *(f"{name}: {value:.2f}" for name, value in record["ratios"].items())]
    return "\n".join(lines)


def count_operations(work: Callable[[], Any]) -> int:
    """Lines of Python that `work` runs, of this package and everything that it calls: exact, unlike a time."""
    import sys

    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
