"""kvlab bench: the engine and transformers on the same requests; prefix caching against the bare hash chain;
decode attention over pages against contiguous memory."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HELP = "measure the engine, attention or the prefix cache, both sides in one run"
SCENARIOS = ("single", "mixed", "continuous", "long")
RESULT = Path("book/results/bench_engine.json")
PREFIX_RESULT = Path("book/results/bench_prefix.json")
ATTENTION_RESULT = Path("book/results/bench_attention.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvlab bench`."""
    parser.add_argument(
        "what",
        choices=["engine", "prefix", "attention"],
        help="engine: tokens per second of whole requests; prefix: microseconds a page of bookkeeping; "
        "attention: pages over contiguous memory, 8 and 4 bits against fp32",
    )
    parser.add_argument("--against", choices=["transformers"], help="the other side of `engine` (default transformers)")
    parser.add_argument("--model", help="directory, .gguf file or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--repeats", type=int, metavar="N", help="repetitions of each load (default: 2 to 5)")
    parser.add_argument("--only", metavar="LOADS", help=f"some of {','.join(SCENARIOS)}, separated by commas")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--save", action="store_true", help=f"write {RESULT} or its like (run from the checkout)")


def run(args: argparse.Namespace) -> int:
    """0 after the results are printed; whether they reach their targets is for the reader to see.

    Raises:
        ValueError: an unknown load, no repetitions, or no model.
    """
    _check(args)
    only = tuple(args.only.split(",")) if args.only else SCENARIOS
    if args.what == "prefix":
        return _prefix(args)
    if args.what == "attention":
        return _attention(args)
    from kvlab.lab import bench_engine

    record = bench_engine.run_bench(args.model, args.repeats, only)
    if args.save:
        bench_engine.save(record, RESULT)
    print(json.dumps(record, indent=1) if args.json else bench_engine.report(record))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuses what this measurement would ignore."""
    takes = {"engine": ("against", "model", "only"), "attention": ("only",), "prefix": ()}[args.what]
    for name in ("against", "model", "only"):
        if getattr(args, name) is not None and name not in takes:
            raise ValueError(f"--{name}: is no option of bench {args.what}")
    if args.repeats is not None and args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats}: must be at least 1")


def _prefix(args: argparse.Namespace) -> int:
    from kvlab.lab import bench_prefix

    record = bench_prefix.run_bench(args.repeats or 9)
    if args.save:
        PREFIX_RESULT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1) if args.json else bench_prefix.report(record))
    return 0


def _attention(args: argparse.Namespace) -> int:
    from kvlab.lab import bench_attention

    record = bench_attention.run_bench(args.repeats or 7, args.only.split(",") if args.only else ())
    if args.save:
        ATTENTION_RESULT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1) if args.json else bench_attention.report(record))
    return 0
