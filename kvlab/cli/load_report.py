"""What `simulate` and `replay` share: what a trace may be, the load's options, and the result as a table."""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

TRACE = """\
TRACE is a file, or a recipe such as
random:n=500,rate=2,prompt=512,output=128,burstiness=0.5,spread=0.6,prefixes=4,prefix=256
Files are told apart by their first line:
  Mooncake, Bailian  JSON lines: timestamp, input_length, output_length, hash_ids
  Azure              CSV: TIMESTAMP, ContextTokens, GeneratedTokens
  BurstGPT           CSV: Timestamp, Request tokens, Response tokens
  ShareGPT           JSON: conversations of turns; a tokenizer counts each first question and answer; give --rate
  lengths            CSV: num_prefill_tokens, num_decode_tokens; arrived_at if there, else give --rate
"""


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that pick and change a trace, and the objective of goodput."""
    load = parser.add_argument_group("load")
    load.add_argument(
        "--tokenizer", metavar="MODEL", help="that counts ShareGPT's texts (default: the default model's)"
    )
    load.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    load.add_argument("--speed", type=float, default=1.0, metavar="X", help="divide all gaps between arrivals by X")
    load.add_argument("--rate", type=float, metavar="R", help="arrivals per second instead of the trace's own")
    load.add_argument(
        "--burstiness", type=float, metavar="B", help="of --rate: 1 is Poisson (default), less is burstier"
    )
    load.add_argument("--clip", metavar="N", help="cut requests to N tokens in and out, as in 2k")
    load.add_argument("--seed", type=int, default=0, metavar="N", help="of --rate and of made-up prompts (default 0)")
    load.add_argument("--slo-ttft", type=float, default=2.0, metavar="S", help="seconds to the first token (default 2)")
    load.add_argument(
        "--slo-tpot", type=float, default=0.1, metavar="S", help="seconds per token after it (default 0.1)"
    )


def load_of(args: argparse.Namespace) -> tuple[Any, Any]:
    """(trace, objective) that the arguments name.

    Raises:
        ValueError, OSError: a trace that cannot be read, an option out of its range.
    """
    from kvlab.simulate import Objective, Recipe, parse_recipe, read_trace, synthetic
    from kvlab.simulate.synthetic import arrivals
    from kvlab.specs.units import parse_tokens

    if args.trace.startswith("random:"):
        trace = synthetic(parse_recipe(args.trace))
    else:
        trace = read_trace(args.trace, count=_Counting(args.tokenizer), limit=args.limit)
    if args.tokenizer is not None and trace.kind != "sharegpt":
        raise ValueError(f"--tokenizer: counts ShareGPT's texts, and {trace.name} is {trace.kind}")
    if args.limit is not None:
        trace = trace.head(args.limit)
    if args.clip is not None:
        trace = trace.clipped(parse_tokens(args.clip, "--clip"))
    if args.rate is not None:
        burstiness = 1.0 if args.burstiness is None else args.burstiness
        recipe = Recipe(rate=args.rate, burstiness=burstiness, seed=args.seed)
        trace = trace.arriving(itertools.islice(arrivals(recipe), len(trace.requests)))
    elif args.burstiness is not None:
        raise ValueError("--burstiness: is of --rate, give both")
    if not trace.timed:
        raise ValueError(f"{trace.name}: has no arrival times; give --rate")
    for name in ("slo_ttft", "slo_tpot"):
        if not 0 < getattr(args, name) < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be a positive number of seconds")
    return trace.faster(args.speed), Objective(args.slo_ttft, args.slo_tpot)


class _Counting:
    """Tokens of a text; the tokenizer is read, and named on stderr, when the first is counted."""

    def __init__(self, model: str | None) -> None:
        self._model, self._tokenizer = model, None

    def __call__(self, text: str) -> int:
        if self._tokenizer is None:
            self._tokenizer = self._read()
        return len(self._tokenizer.encode(text, special=False))

    def _read(self) -> Any:
        from kvlab.models.load import locate
        from kvlab.models.tokenizer import Tokenizer

        name, directory, _ = locate(self._model)
        tokenizer = Tokenizer.from_directory(directory)
        if tokenizer is None:
            raise ValueError(f"--tokenizer {self._model}: the model has no tokenizer")
        print(f"kvlab: texts are counted with the tokenizer of {name}", file=sys.stderr)
        return tokenizer


def print_summary(result: dict[str, Any]) -> None:
    """The result of a run on stdout, 80 columns."""
    n, seconds = result["requests"], result["seconds"]
    skipped = next(result[key]["skipped_rows"] for key in ("simulated", "replayed") if key in result)
    left_out = "".join(f"; rows left out: {count} x {reason}" for reason, count in skipped.items())
    print(f"{n} requests, {result['finished']} finished in {seconds:,.1f} s{left_out}")
    if facts := result.get("simulated"):
        print(f"{facts['model'] or 'the model'} on {facts['gpu']} (rates: {facts['clock']})")
    for error, count in result["errors"].items():
        print(f"  {count} x {error}")
    rate = result["output_tokens_per_s"]
    if rate:
        print(f"output {rate:,.1f} tokens/s, {result['requests_per_s']:.2f} requests/s")
        o = result["objective"]
        print(
            f"goodput {result['goodput_requests_per_s']:.2f} requests/s: {result['good_requests']} kept TTFT <= "
            f"{o['ttft_s']:g} s and {o['tpot_s']:g} s per token"
        )
    hit = result.get("prefix_hit_rate")
    rate = "not told" if hit is None else f"{hit:.1%} ({result['hit_tokens']:,.0f} tokens)"
    print(f"prefix hit rate {rate}, preemptions {_told(result, 'preemptions')}")
    found = result.get("cached_tokens_by_source") or {}
    if any(found.values()):
        told = ", ".join(f"{source} {tokens:,.0f}" for source, tokens in found.items() if tokens or source == "device")
        print(f"prompt tokens not computed again, by where they were found: {told}")
    columns = (("ttft_s", "TTFT s", 1), ("itl_s", "ITL ms", 1e3), ("e2e_s", "E2E s", 1))
    print(f"\n{'prompt tokens':>14} {'requests':>8} " + " ".join(f"{title:^17}" for _, title, _ in columns).rstrip())
    print(f"{'':>23} " + " ".join(" ".join(f"{p:>5}" for p in ("p50", "p90", "p99")) for _ in columns))
    for name, row in result["latency"].items():
        if row:
            print(f"{name:>14} {row['requests']:>8} " + " ".join(_three(row[key], by) for key, _, by in columns))


def _told(result: dict[str, Any], name: str) -> str:
    value = result.get(name)
    return "not told" if value is None else f"{value:g}"


def _three(values: dict[str, float] | None, scale: float) -> str:
    return " ".join(f"{_short(values[p] * scale):>5}" if values else f"{'':5}" for p in ("p50", "p90", "p99"))


def _short(value: float) -> str:
    """Three figures, of what is below 1 three decimals: five letters up to 99,999."""
    return f"{value:.{next((d for d, low in ((0, 99.95), (1, 9.995), (2, 0.9995)) if value >= low), 3)}f}"
