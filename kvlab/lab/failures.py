"""Faults planted in an engine on purpose, each undone when its `with` block ends, and what finds them.

Each fault is a small change of one function of one engine (or, for the codec, of the process). A detector reads tables,
pages or the event log and knows nothing of the fault.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from kvlab import quant
from kvlab.cache import KVCacheManager
from kvlab.cache.pool import NULL_BLOCK
from kvlab.engine import Engine
from kvlab.ops.coded import decode_rows
from kvlab.ops.views import PageViews
from kvlab.schedule.events import Event
from kvlab.specs.layout import Group
from kvlab.specs.pages import table_pages

ROUNDS_TO_MAX = 464.0  # halfway between 448, the largest e4m3, and the 480 that would come next


@contextmanager
def without_clamp() -> Iterator[None]:
    """Within: fp8_e4m3 codes are cast without clamp, by a cast that does not saturate, so what is too large becomes NaN.

    torch's own cast on the CPU saturates, others do not, and a kernel must not depend on it. Applies to engines of the
    torch operations, which are chosen for as long as this holds.
    """

    def encode(x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x.masked_fill(x.abs() > ROUNDS_TO_MAX, torch.nan).to(torch.float8_e4m3fn), None

    codec, forced = quant.get_codec("fp8_e4m3"), os.environ.get("KVLAB_OPS")
    quant._CODECS["fp8_e4m3"] = replace(codec, encode=encode)
    os.environ["KVLAB_OPS"] = "torch"
    try:
        yield
    finally:
        quant._CODECS["fp8_e4m3"] = codec
        if forced is None:
            del os.environ["KVLAB_OPS"]
        else:
            os.environ["KVLAB_OPS"] = forced


@contextmanager
def louder_keys(engine: Engine, layer: int, factor: float) -> Iterator[None]:
    """Within: the key projection of one layer is `factor` times as large, as a badly scaled checkpoint would have it."""
    weights = engine.model.decoder.weights.named
    kept = {n: w.clone() for n, w in weights.items() if f"layers.{layer}." in n and "k_proj" in n}
    with torch.no_grad():
        for name in kept:
            weights[name].mul_(factor)
        try:
            yield
        finally:
            for name, tensor in kept.items():
                weights[name].copy_(tensor)


def stored_peaks(engine: Engine) -> dict[str, torch.Tensor]:
    """Per live request the largest absolute value that each layer holds of each position: fp32 [layers, computed].

    NaN where a key or a value is NaN, 0 where a layer holds no keys and values of that position.
    """
    views = engine.runner.views  # with the scales found from data
    found = {}
    for request_id, computed in engine.cache.computed.items():
        found[request_id] = torch.zeros(len(views), computed)
        for layer, parts in enumerate(views):
            for part in parts:
                if isinstance(part, PageViews) and computed:
                    peaks = _peaks(engine.cache, part, request_id)[:computed]
                    found[request_id][layer] = torch.maximum(found[request_id][layer], peaks)
    return found


def _peaks(cache: KVCacheManager, views: PageViews, request_id: str) -> torch.Tensor:
    """fp32 [slots of the request's table]: the largest absolute value of key and value; 0 where no page is held."""
    pages = torch.tensor(cache.block_table(request_id, views.group or 0))
    held = (pages != NULL_BLOCK).repeat_interleave(views.block_size)
    peaks = torch.zeros(len(held))
    for name in ("k", "v"):
        rows = decode_rows(views, name, pages, heads=-3).float()  # [pages, heads, block_size, D]
        peaks = torch.maximum(peaks, rows.abs().amax((1, 3)).flatten())
    return torch.where(held, peaks, 0.0)


def non_finite(engine: Engine) -> dict[str, torch.Tensor]:
    """Per live request which layers hold a key or value that is not finite, by position: bool [layers, computed]."""
    return {request_id: ~peaks.isfinite() for request_id, peaks in stored_peaks(engine).items()}


@contextmanager
def unwatched(engine: Engine) -> Iterator[None]:
    """Within: the engine looks at logits alone, and not at the rows of a prompt from which nobody samples."""
    engine.row_check.spoiled = lambda step: frozenset()  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.row_check.spoiled


@contextmanager
def late_free(engine: Engine) -> Iterator[list[int]]:
    """Within: the pages of the first request that leaves are released a second time, after another has taken them.

    So it goes when two parties release: the scheduler at a preemption, and a copy that had the pages too and is done
    later. Yields the pages that were released twice.
    """
    cache, late = engine.cache, []
    freed: list[tuple[int, int]] = []
    free, allocate = cache.free, cache.allocate

    def freeing(request_id: str, distrust: bool = False) -> int:
        if not freed:
            tables = cache.tables.get(request_id, ())
            freed.extend((g, page) for g, table in enumerate(tables) for page in table if page != NULL_BLOCK)
        return free(request_id, distrust)

    def allocating(*args, **kwargs) -> bool:
        taken = allocate(*args, **kwargs)
        for g, page in list(freed):
            if not late and cache.pools[g].references[page]:
                cache.pools[g].free([page])
                late.append(page)
        return taken

    cache.free, cache.allocate = freeing, allocating
    try:
        yield late
    finally:
        del cache.free, cache.allocate


def overheld(cache: KVCacheManager) -> dict[int, list[str]]:
    """Pages that stand in more tables than they have references, and whose: free while held, or held by two unawares."""
    holders: dict[tuple[int, int], list[str]] = defaultdict(list)
    for request_id, tables in cache.tables.items():
        for g, table in enumerate(tables):
            for page in table:
                if page != NULL_BLOCK:
                    holders[g, page].append(request_id)
    return {page: names for (g, page), names in holders.items() if len(names) > cache.pools[g].references[page]}


@contextmanager
def leak_on_abort(engine: Engine) -> Iterator[None]:
    """Within: a request that is aborted is forgotten and its pages are not given back."""
    cache, scheduler = engine.cache, engine.scheduler
    abort, free = scheduler.abort, cache.free

    def aborting(request_id: str, now: float) -> bool:
        def forgetting(name: str, distrust: bool = False) -> int:
            cache.tables.pop(name, None)
            cache.computed.pop(name, None)
            cache._cleared.pop(name, None)
            return 0

        cache.free = forgetting
        try:
            return abort(request_id, now)
        finally:
            cache.free = free

    scheduler.abort = aborting
    try:
        yield
    finally:
        del scheduler.abort
        cache.__dict__.pop("free", None)


@dataclass(frozen=True)
class Unreturned:
    """A request that ended and gave back fewer pages than its tokens took: those it `took`, `gave_back`, and its end."""

    request_id: str
    took: int
    gave_back: int
    ended: str


def unreturned(events: Sequence[Event], groups: Sequence[Group]) -> list[Unreturned]:
    """The requests of a log that gave back fewer pages than they took, from the events alone.

    A request takes the pages of the tokens that it was given since it was last admitted; they go back behind a
    window ("release"), when it is preempted, and when it ends.
    """
    tokens: Counter[str] = Counter()
    returned: Counter[str] = Counter()
    found = []
    for event in events:
        name = event.request_id
        if event.kind in ("chunk", "hit", "load"):
            tokens[name] += event.tokens
        elif event.kind == "rollback":
            tokens[name] -= event.tokens
        elif event.kind == "release":
            returned[name] += event.pages
        elif event.kind == "preempt" and event.tokens:
            tokens[name] = returned[name] = 0
        elif event.kind == "finish":
            took = sum(table_pages(group.retention, group.block_size, tokens[name]) for group in groups)
            given = returned[name] + event.pages
            if given < took:
                found.append(Unreturned(name, took, given, event.reason))
    return found


@contextmanager
def without_admission_check(engine: Engine) -> Iterator[None]:
    """Within: a request that no pool of this size can ever hold is let in."""
    engine.cache.too_long = lambda tokens: ""
    try:
        yield
    finally:
        del engine.cache.too_long


def head_of_line(engine: Engine) -> tuple[str, str]:
    """(the request that others wait behind, why it waits); ("", "") when nobody waits or somebody runs."""
    if engine.scheduler.running or not engine.scheduler.waiting:
        return "", ""
    waits = engine.events.of("wait")
    return (waits[-1].request_id, waits[-1].reason) if waits else ("", "")
