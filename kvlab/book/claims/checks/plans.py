"""Checks on plans: memory, how many fit, times; and the counted work of generating with and without a cache."""

from __future__ import annotations

from typing import Any

from kvlab.book.claims.checks.registry import Value, check, run
from kvlab.book.claims.checks.shapes import model_spec, token_readings
from kvlab.plan import make_plan
from kvlab.plan.capacity import max_concurrent
from kvlab.plan.counts import StepCounts, generation_counts
from kvlab.plan.hardware import get_gpu
from kvlab.plan.timing import cache_read_bytes, step_time
from kvlab.specs.units import gb, gib, parse_bytes


def _size(number: int, label: str = "") -> Value:
    return Value(number, f"{label}{number:,} B = {gb(number)} = {gib(number)}", brief=label + gb(number))


@check
def size(text: str) -> Value:
    """A size the text itself takes as given, such as "8GB"."""
    return _size(parse_bytes(text))


@check
def gpu_memory(gpu: str) -> Value:
    """Bytes of memory of one GPU, as the driver reports them where that is known; else as it is sold."""
    return _size(get_gpu(gpu).memory_bytes, f"{get_gpu(gpu).name} ")


LABELS = {
    "memory.free_for_kv_bytes": "free for the cache",
    "timing.decode.ms": "decode step",
    "timing.prefill.ms": "prompt",
    "timing.decode.weights_read_bytes": "weights read in a step",
    "max_concurrent": "whole sequences that fit:",
    "weights_bytes": "weights",
    "kv_bytes": "cache",
}


@check
def plan_number(model: str, field: str, **options: Any) -> Value:
    """A field of the plan's JSON, "memory.free_for_kv_bytes" or "timing.prefill.ms"; times in seconds."""
    found: Any = make_plan(model, **options).to_json()
    for name in field.split("."):
        found = found[name]
    label = LABELS.get(field, field.rpartition(".")[2])
    if field.endswith("bytes"):
        return _size(found, f"{label} ")
    if field.endswith("ms"):
        return Value(found / 1e3, f"{label} {found:,.2f} ms" if found < 1000 else f"{label} {found / 1e3:,.2f} s")
    return Value(found, f"{label} {found:,}")


@check
def weights_bytes(model: str, weight_dtype: str = "bf16") -> Value:
    """Bytes of the weights in a storage format."""
    return plan_number(model, "weights_bytes", weight_dtype=weight_dtype)


@check
def whole_sequences(budget: dict[str, Any], model: str, tokens: str, kv_dtype: str = "bf16") -> Value:
    """Whole sequences of `tokens` tokens that fit the budget, itself a check."""
    room, spec = run(budget), model_spec(model, kv_dtype)
    exact, decimal = token_readings(tokens)
    one, other = spec.bytes_at(exact), spec.bytes_at(decimal)
    fit, fit_decimal = (max_concurrent(int(room.number), n) for n in (one, other))
    text = f"{room.number / one:,.2f}, so {fit} whole, of {gb(one)} in {gb(int(room.number))} ({exact:,} tokens each"
    text += f"; {fit_decimal} of {decimal:,})" if decimal != exact else ")"
    return Value(fit, text, (fit_decimal,))


@check
def cache_read_time(
    model: str, tokens: str, *, gpu: str = "", bandwidth: str = "", kv_dtype: str = "bf16", sequences: int = 1
) -> Value:
    """Seconds in which one decode step reads the caches of `sequences` sequences, at a GPU's or a given bandwidth."""
    rate = parse_bytes(bandwidth) if bandwidth else get_gpu(gpu).bandwidth_bytes_per_s
    spec = model_spec(model, kv_dtype)
    moved = [cache_read_bytes(spec, n) * sequences for n in token_readings(tokens)]
    number, other = (step_time(0, n, 0, rate, None).memory_s for n in moved)
    what = f"{sequences} x {token_readings(tokens)[0]:,}" if sequences > 1 else f"{token_readings(tokens)[0]:,}"
    text = f"{number * 1e3:,.2f} ms for {gb(moved[0])} ({what} tokens) at {rate / 1e12:,.2f} TB/s"
    text += f"; {other * 1e3:,.2f} ms with k = 1,000" if other != number else ""
    return Value(number, text, (other,), f"{number * 1e3:,.2f} ms")


WORK = {"projected": "keys and values computed", "scored": "query-key products", "copied": "positions copied"}


def _work(counts: StepCounts, less: StepCounts | None, what: str, when: str) -> Value:
    number = getattr(counts, what) - (getattr(less, what) if less else 0)
    return Value(number, f"{number:,} {WORK[what]} {when}")


@check
def generation_work(new: int, cached: bool, what: str) -> Value:
    """What one layer does, in all, to generate `new` tokens after a prompt of one: projected, scored."""
    when = f"for {new:,} tokens with{'' if cached else 'out'} a cache"
    return _work(generation_counts(1, new, cached=cached), None, what, when)


@check
def step_work(context: int, cached: bool, what: str, concatenates: bool = False) -> Value:
    """What one layer does for the token after `context` tokens: projected, scored, copied."""
    when = f"in the step after {context:,} tokens with{'' if cached else 'out'} a cache"
    after, before = (generation_counts(context, n, cached=cached, concatenates=concatenates) for n in (2, 1))
    return _work(after, before, what, when)
