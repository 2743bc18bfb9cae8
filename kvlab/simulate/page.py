"""What the simulator widget computes: a pasted trace on a machine that the reader does not have, as figures for people.

`simulate_state(params, tell)` runs in a kernel and in the reader's browser alike. `tell(done, of, text)` hears how far
it is; when it answers true the run ends early and the figures are those until then.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from kvlab.plan.hardware import gpus
from kvlab.simulate.options import PREFIX
from kvlab.simulate.simulator import simulate
from kvlab.simulate.trace_files import parse_trace
from kvlab.simulate.traces import Trace
from kvlab.specs.catalogue import names
from kvlab.specs.settings import over_defaults, whole_number
from kvlab.specs.units import human_bytes

Tell = Callable[[int, int, str], object]

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "gemma-3-27b", "deepseek-v3", "gpt-oss-120b")
DEFAULTS: dict[str, Any] = {
    "trace": "", "model": "llama-3.1-70b", "gpu": "h200", "tp": 4, "weight_dtype": "bf16", "prefix": "hash",
    "rate": 2.0, "rows": 2000,
}  # fmt: skip
WEIGHTS = ("bf16", "fp8_e4m3", "int4_g32")
RANGES = {"tp": (1, 16), "rows": (1, 5000)}


def example(count: int = 60, seed: int = 7) -> str:
    """Mooncake-like JSON lines, made up: `count` requests, most of which begin with one of three shared prompts."""
    rng, lines, at, fresh = random.Random(seed), [], 0.0, 100
    for _ in range(count):
        at += rng.expovariate(1 / 400)
        shared, own = rng.choice((0, 0, 2, 4, 6)), rng.randint(1, 9)
        length = (shared + own) * 512 - rng.randint(0, 500)
        ids = list(range(10 * shared, 11 * shared)) + list(range(fresh, fresh + own))
        fresh += own
        row = {"timestamp": round(at), "input_length": length, "output_length": rng.randint(20, 400), "hash_ids": ids}
        lines.append(json.dumps(row))
    return "\n".join(lines)


def simulate_params(params: dict[str, Any]) -> dict[str, Any]:
    """`params` over the defaults; an empty trace is the example.

    Raises:
        ValueError: an unknown setting, or one out of its range; it is named.
    """
    found = over_defaults(DEFAULTS, params)
    for name, (low, high) in RANGES.items():
        found[name] = whole_number(name, found[name], low, high)
    for name, known in (("model", names()), ("gpu", gpus()), ("prefix", PREFIX), ("weight_dtype", WEIGHTS)):
        if found[name] not in known:
            raise ValueError(f"{name} {found[name]!r}: must be one that kvlab knows")
    if not isinstance(found["rate"], int | float) or not 0 < found["rate"] <= 10_000:
        raise ValueError(f"rate {found['rate']!r}: must be requests per second, above 0 and at most 10,000")
    if not isinstance(found["trace"], str):
        raise ValueError("trace: must be text")
    found["trace"] = found["trace"].strip() or example()
    return found


def pasted_trace(used: dict[str, Any]) -> Trace:
    """The trace in `used`, at its own arrivals, or at `rate` requests per second where it has none."""
    trace = parse_trace(used["trace"].splitlines(), "the trace").head(used["rows"])
    return trace if trace.timed else trace.arriving(i / used["rate"] for i in range(len(trace.requests)))


def simulate_state(params: dict[str, Any], tell: Tell | None = None) -> dict[str, Any]:
    """The figures of a simulation, as JSON data.

    Returns:
        `params` as used, `title`, `cards` ([name, value, detail] each), `head` and `rows` of a table of latencies by
        length, `notes`, and `cancelled`.

    Raises:
        ValueError: a setting out of its range, a trace that cannot be read, weights that leave no room.
    """
    used = simulate_params(params)
    trace = pasted_trace(used)
    progress = None
    if tell:

        def progress(done: int, of: int, now: float) -> object:
            return tell(done, of, f"{done} of {of} requests ended after {now:,.0f} simulated seconds")

    options = {name: used[name] for name in ("gpu", "tp", "weight_dtype", "prefix")}
    found = simulate(trace, used["model"], progress, **options).to_json()
    return {
        "params": used,
        "title": f"{used['model']} on {used['tp']} x {used['gpu']}: {len(trace.requests):,} requests ({trace.kind}), "
        f"{trace.duration_s:,.0f} seconds of arrivals",
        "cards": cards(found),
        "head": [
            "Prompt tokens",
            "Requests",
            "First token p50",
            "p90",
            "p99",
            "Between tokens p50",
            "p99",
            "Whole p50",
        ],
        "rows": [latency_row(name, row) for name, row in found["latency"].items() if row],
        "notes": notes(found, trace),
        "cancelled": found["cancelled"],
    }


def cards(found: dict[str, Any]) -> list[list[str]]:
    """The main figures."""
    pool, objective = found["simulated"]["kv_pool_bytes_per_gpu"], found["objective"]
    goal = f"first token within {objective['ttft_s']:g} s, then {1e3 * objective['tpot_s']:g} ms a token"
    return [
        ["Finished", f"{found['finished']:,} of {found['requests']:,}", f"{found['refused']:,} refused"],
        ["Within the objective", f"{found['good_requests']:,}", goal],
        ["Output tokens/s", _number(found["output_tokens_per_s"]), "all together"],
        ["Prompt tokens found in the cache", _percent(found["prefix_hit_rate"]), f"{found['hit_tokens']:,} tokens"],
        ["Preemptions", f"{found['preemptions']:,}", f"{found['preempted_tokens']:,} tokens computed again"],
        ["Cache at its fullest", human_bytes(found["peak_kv_bytes"]), f"pool {human_bytes(pool)} on each GPU"],
    ]  # fmt: skip


def latency_row(name: str, row: dict[str, Any]) -> list[str]:
    """One line of the table: a bucket of lengths, or all."""

    def shown(metric: str, percent: str) -> str:
        return "-" if not row[metric] else _seconds(row[metric][percent])

    return [
        name, f"{row['requests']:,}", *(shown("ttft_s", p) for p in ("p50", "p90", "p99")),
        shown("itl_s", "p50"), shown("itl_s", "p99"), shown("e2e_s", "p50"),
    ]  # fmt: skip


def notes(found: dict[str, Any], trace: Trace) -> list[str]:
    """What the figures rest on."""
    bound = ", ".join(f"{share:.0%} by {name}" for name, share in found["bound_share"].items() if share)
    facts = found["simulated"]
    said = [
        f"The scheduler and cache are kvlab's own; a step takes what a roofline says ({facts['clock']}).",
        f"Steps were bound {bound}." if bound else "No step ran.",
        f"At most {facts['max_num_seqs']} requests and {facts['max_batched_tokens']:,} tokens a step, "
        f"{facts['kv_dtype']} cache, {facts['weight_dtype']} weights.",
    ]  # fmt: skip
    return said + [f"{count:,} rows left out: {reason}." for reason, count in trace.skipped]


def _seconds(value: float) -> str:
    return f"{1e3 * value:,.1f} ms" if value < 1 else f"{value:,.2f} s"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
