"""Checks on prefix caching: what the real cache manager finds of a request, and of the guide's five workloads."""

from __future__ import annotations

from functools import cache
from typing import Any

from kvlab.book.claims.checks.registry import Value, check
from kvlab.book.claims.checks.shapes import model_spec
from kvlab.cache import KVCacheManager, PrefixOptions
from kvlab.lab.workloads import WORKLOADS, broken, replay
from kvlab.schedule import Request, SamplingParams
from kvlab.specs.layout import group_parts

MODEL = "llama-3-8b"


@check
def pages_found(
    shared: int, tokens: int, block_size: int = 16, earlier: bool = True, temperature: float = 0.0, design: str = "hash"
) -> Value:
    """Pages that a request of `tokens` tokens finds after an `earlier` one that agrees with its first `shared` tokens."""
    groups = group_parts(model_spec(MODEL), block_size)
    manager = KVCacheManager(groups, [99] * len(groups), tokens, prefix=PrefixOptions(design))
    prompts = ([*range(shared), *range(1000, 1000 + tokens - shared)], list(range(tokens)))
    for prompt in prompts[: 1 if earlier else 0]:
        request = Request("first", prompt, SamplingParams())
        manager.allocate("first", tokens, hit=manager.match(request))
        manager.advance("first", tokens)
        manager.free("first")
    found = manager.match(Request("second", prompts[1], SamplingParams(temperature=temperature))).tokens
    number = found // block_size
    hot = f", temperature {temperature:g}" if temperature else ""
    return Value(
        number, f"{number} of {tokens // block_size} pages of {block_size} tokens found",
        brief=f"{number} of {tokens // block_size} pages found ({shared} equal tokens{hot})",
    )  # fmt: skip


@check
def pages_new(shared: int, tokens: int, block_size: int = 16) -> Value:
    """Pages that such a request has to compute."""
    number = tokens // block_size - int(pages_found(shared, tokens, block_size).number)
    return Value(number, f"{number} to compute")


@cache
def _reuse(workload: str, change: str, design: str, parameters: tuple[tuple[str, Any], ...]) -> tuple[int, int]:
    made = broken(WORKLOADS[workload](**dict(parameters)), change)
    reuse = replay(made, model_spec(MODEL), PrefixOptions(design))
    return reuse.hits, reuse.queries


@check
def workload_hit_rate(workload: str, change: str = "nothing", design: str = "hash", **parameters: Any) -> Value:
    """The share of a workload's prompt tokens that an unlimited cache finds, after one change to every prompt."""
    hits, queries = _reuse(workload, change, design, tuple(sorted(parameters.items())))
    what = ", ".join([*(f"{k} {v}" for k, v in parameters.items()), *([change] if change != "nothing" else [])])
    shown = f"{100 * hits / queries:,.1f} %"
    apart = ", ".join([*([change] if change != "nothing" else []), *(["tree"] if design == "radix" else [])])
    return Value(
        hits / queries, f"{workload}{f' ({what})' if what else ''}: {shown} of {queries:,} tokens",
        brief=f"{shown} ({apart or 'hashed pages'})",
    )  # fmt: skip
