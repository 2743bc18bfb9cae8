"""The engine against transformers' own generation: same weights, same requests, both sides in turn in one run.

    kvlab bench engine --against transformers [--json] [--save]

Four loads: one stream; a mixed load against padded static batches and against continuous batching; decoding far
into a long context. A ratio is taken within each repetition, so that what else the machine does hits both sides;
the median and the extremes over the repetitions are reported.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvlab.lab.bandwidth import read_bandwidth
from kvlab.lab.bench_load import Load, Ours, Transformers, make_load, mixed_shapes
from kvlab.lab.record import provenance
from kvlab.models.load import load_model

SCENARIOS = ("single", "mixed", "continuous", "long")
TARGETS = {"single": 2.0, "mixed": 2.0, "continuous": 4.0, "long": 2.0}
REPEATS = {"single": 5, "mixed": 3, "continuous": 2, "long": 5}
MIXED_REQUESTS, STATIC_BATCH = 32, 16
LONG_CONTEXT, LONG_TOKENS = 4096, 12  # tokens of a repetition; all repetitions decode behind one prompt

Say = Callable[[str], None]


class Bench:
    """Both engines on one model, and the repetitions of each load.

    Args:
        target: as in `kvlab.models.load.load_model`.
        repeats: of each load, after one warm-up of both sides; None for as many as `REPEATS` has.

    Attributes:
        steps: seconds of our decode steps by context, as far as they were measured.
    """

    def __init__(self, target: str | None, repeats: int | None, say: Say) -> None:
        self.repeats, self.say = repeats, say
        self.steps: dict[int, list[float]] = {}
        self.model = load_model(target, "fp32", "cpu")
        self.ours = Ours(self.model, STATIC_BATCH)
        self.theirs = Transformers(target)
        self.vocab = self.model.config.vocab_size

    def single(self) -> dict[str, Any]:
        """One stream, 128 tokens in, 64 out; tokens/s with the prompt's time included."""
        load = make_load([(128, 64)], self.vocab)
        return self._loads("single", load, lambda: self.theirs.run_padded(load, 1))

    def mixed(self) -> dict[str, Any]:
        """32 requests of 32-256 in, 16-128 out, against static batches of 16; useful tokens/s."""
        load = make_load(mixed_shapes(MIXED_REQUESTS), self.vocab)
        return self._loads("mixed", load, lambda: self.theirs.run_padded(load, STATIC_BATCH))

    def continuous(self) -> dict[str, Any]:
        """The mixed load against transformers' continuous batching; neither side holds any of the 32 back."""
        load = make_load(mixed_shapes(MIXED_REQUESTS), self.vocab)
        ours = Ours(self.model, MIXED_REQUESTS)
        return self._loads("continuous", load, lambda: self.theirs.run_continuous(load), ours)

    def long(self) -> dict[str, Any]:
        """Decoding behind 4,096 tokens: tokens/s from the median time of a token; each side computes the prompt once."""
        prompt = make_load([(LONG_CONTEXT, 1)], self.vocab).prompts[0]
        total = (self.repeats or REPEATS["long"]) * LONG_TOKENS
        self.say("long: computing the prompt on both sides")
        ours, theirs = self.ours.prefilled(prompt, total), self.theirs.prefilled(prompt, total)
        self.steps[LONG_CONTEXT] = []

        def our_rate() -> float:
            seconds = ours(LONG_TOKENS)
            self.steps[LONG_CONTEXT] += seconds
            return 1 / statistics.median(seconds)

        return self._pairs("long", our_rate, lambda: 1 / statistics.median(theirs(LONG_TOKENS)))

    def roofline(self, context: int) -> dict[str, Any]:
        """A decode step against reading every weight and cache byte once at the measured bandwidth."""
        if context not in self.steps:
            prompt = make_load([(context, 1)], self.vocab).prompts[0]
            self.steps[context] = self.ours.prefilled(prompt, 24)(24)
        step = statistics.median(self.steps[context])
        weights = self.model.decoder.weights.num_bytes
        cache = self.model.spec.bytes_at(context + len(self.steps[context]) // 2)
        bandwidth = read_bandwidth(weights)
        return {
            "context": context, "step_ms": 1e3 * step, "weight_bytes": weights, "cache_bytes": cache,
            "read_gb_per_s": bandwidth / 1e9, "bytes_per_s_gb": (weights + cache) / step / 1e9,
            "share_of_bandwidth": (weights + cache) / bandwidth / step,
        }  # fmt: skip

    def _loads(self, name: str, load: Load, theirs: Callable[[], float], ours: Ours | None = None) -> dict[str, Any]:
        tokens, ours = load.useful_tokens, ours or self.ours
        return self._pairs(name, lambda: tokens / ours.run(load), lambda: tokens / theirs())

    def _pairs(self, name: str, ours: Callable[[], float], theirs: Callable[[], float]) -> dict[str, Any]:
        """Medians and extremes of both rates and of their ratio, sides in turn."""
        rates: list[tuple[float, float]] = []
        repeats = self.repeats or REPEATS[name]
        for i in range(repeats):
            rates.append((ours(), theirs()) if i % 2 == 0 else (theirs(), ours())[::-1])
            self.say(f"{name} {i + 1}/{repeats}: kvlab {rates[-1][0]:.1f}, transformers {rates[-1][1]:.1f} tokens/s")
        return {
            "kvlab_tokens_per_s": spread([a for a, _ in rates]),
            "transformers_tokens_per_s": spread([b for _, b in rates]),
            "ratio": spread([a / b for a, b in rates]),
            "target": TARGETS[name],
        }


def spread(values: list[float]) -> dict[str, Any]:
    """Median, extremes and all values, in order of measurement."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": values}


def run_bench(
    target: str | None = None, repeats: int | None = None, only: tuple[str, ...] = SCENARIOS, say: Say | None = None
) -> dict[str, Any]:
    """The results of the loads in `only`, with their conditions.

    Raises:
        ValueError: an unknown load, or no repetitions.
    """
    if unknown := set(only) - set(SCENARIOS):
        raise ValueError(f"load {min(unknown)!r}: must be one of {', '.join(SCENARIOS)}")
    if repeats is not None and repeats < 1:
        raise ValueError(f"repeats {repeats}: must be at least 1")
    # before the runs: the commit that is measured, whatever is committed meanwhile
    record = provenance("kvlab bench engine --against transformers", ("torch", "transformers", "numba", "numpy"))
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    bench = Bench(target, repeats, say)
    warm_up(bench)
    results = {}
    for name in (name for name in SCENARIOS if name in only):
        before = os.getloadavg()[0]
        results[name] = getattr(bench, name)()
        results[name] |= {"commit": record["commit"], "load_average": [before, os.getloadavg()[0]]}
    contexts = [n for name, n in (("single", 128), ("long", LONG_CONTEXT)) if name in only]
    return record | {
        "what": "the engine's tokens per second against transformers', both sides of a load in one run",
        "model": bench.model.name,
        "source": bench.model.source,
        "dtype": "fp32",
        "threads": torch.get_num_threads(),
        "results": results,
        "step_against_bandwidth": [bench.roofline(n) for n in contexts],
    }


def warm_up(bench: Bench) -> None:
    """Compiles kernels and touches weights on both sides, outside every measurement."""
    small = make_load([(40, 4), (20, 6), (7, 3)], bench.vocab)
    bench.ours.run(small)
    bench.theirs.run_padded(small, 3)
    one = make_load([(64, 8)], bench.vocab)
    bench.ours.run(one)
    bench.theirs.run_padded(one, 1)


def save(record: dict[str, Any], path: Path) -> None:
    """Writes the record as JSON for the book; loads that were not run keep their result of an earlier run there.

    Each result names the commit it was measured at.
    """
    if path.is_file():
        old = json.loads(path.read_text(encoding="utf-8"))
        if all(old.get(key) == record[key] for key in ("device", "versions", "model", "threads")):
            contexts = {r["context"] for r in record["step_against_bandwidth"]}
            kept = [r for r in old["step_against_bandwidth"] if r["context"] not in contexts]
            steps = sorted(record["step_against_bandwidth"] + kept, key=lambda r: r["context"])
            record = record | {"results": old["results"] | record["results"], "step_against_bandwidth": steps}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def report(record: dict[str, Any]) -> str:
    """The record for people."""
    lines = [f"{record['model']} fp32 on {record['device']}, {record['threads']} threads", ""]
    lines.append(f"{'load':12} {'kvlab':>9} {'transformers':>13}   ratio (range)          asked")
    for name, r in record["results"].items():
        ratio = r["ratio"]
        lines.append(
            f"{name:12} {r['kvlab_tokens_per_s']['median']:9.1f} {r['transformers_tokens_per_s']['median']:13.1f}"
            f"   {ratio['median']:5.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})   {r['target']:.0f}"
        )
    lines.append("\ntokens/s, medians; ratios within repetitions")
    for r in record["step_against_bandwidth"]:
        lines.append(
            f"a step at {r['context']:,} tokens: {r['step_ms']:.1f} ms, reading {r['bytes_per_s_gb']:.1f} of "
            f"{r['read_gb_per_s']:.1f} GB/s ({r['share_of_bandwidth']:.0%})"
        )
    return "\n".join(lines)
