"""kvlab bench: the engine and transformers on the same requests; prefix caching against the bare hash chain."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HELP = "measure the engine against transformers, both in one run"
SCENARIOS = ("single", "mixed", "continuous", "long")
RESULT = Path("book/results/bench_engine.json")
PREFIX_RESULT = Path("book/results/bench_prefix.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvlab bench`."""
    parser.add_argument(
        "what",
        choices=["engine", "prefix"],
        help="engine: tokens per second of whole requests; prefix: microseconds a page of bookkeeping",
    )
    parser.add_argument("--against", choices=["transformers"], default="transformers", help="the other side")
    parser.add_argument("--model", help="directory, .gguf file or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--repeats", type=int, metavar="N", help="repetitions of each load (default: 2 to 5)")
    parser.add_argument("--only", metavar="LOADS", help=f"some of {','.join(SCENARIOS)}, separated by commas")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument(
        "--save", action="store_true", help=f"write {RESULT} or {PREFIX_RESULT} (run from the checkout)"
    )


def run(args: argparse.Namespace) -> int:
    """0 after the results are printed; whether they reach their targets is for the reader to see.

    Raises:
        ValueError: an unknown load, no repetitions, or no model.
    """
    if args.what == "prefix":
        return _prefix(args)
    only = tuple(args.only.split(",")) if args.only else SCENARIOS
    from kvlab.lab import bench_engine

    record = bench_engine.run_bench(args.model, args.repeats, only)
    if args.save:
        bench_engine.save(record, RESULT)
    print(json.dumps(record, indent=1) if args.json else bench_engine.report(record))
    return 0


def _prefix(args: argparse.Namespace) -> int:
    from kvlab.lab import bench_prefix

    record = bench_prefix.run_bench(args.repeats or 9)
    if args.save:
        PREFIX_RESULT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1) if args.json else bench_prefix.report(record))
    return 0
