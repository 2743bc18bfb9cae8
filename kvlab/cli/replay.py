"""`kvlab replay`: a trace of requests sent to an OpenAI-compatible server as it happened."""

from __future__ import annotations

import argparse
import json
import sys

from kvlab.cli.load_report import TRACE, add_load_arguments, load_of, print_summary

HELP = "send a trace of requests to a server and report latencies, goodput, hits, preemptions"

EPILOG = (
    TRACE
    + """\
Requests leave at their times whether or not earlier ones were answered (open loop)."""
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvlab replay`."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("trace", metavar="TRACE", help="file or recipe")
    add("--url", default="http://127.0.0.1:8000", help="of the server (default http://127.0.0.1:8000)")
    add("--model", default="", help="name to ask for (default: the first that the server lists)")
    add("--vocab", type=int, metavar="N", help="token ids of prompts are below (default: the server's, or 10,000)")
    add(
        "--plain", action="store_true", help="OpenAI's fields alone: answers may end early, tokens are counted by chunk"
    )
    add("--timeout", type=float, default=600.0, metavar="S", help="for a whole answer (default 600)")
    add("--api-key", default="", metavar="KEY", help="sent as a bearer token")
    add("--json", action="store_true", help="everything as JSON, times in seconds")
    add_load_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0 after the result is printed, 1 when no request was answered.

    Raises:
        ValueError, OSError: a trace that cannot be read, a server that does not answer.
    """
    trace, objective = load_of(args)
    from kvlab.lab.replay import ReplayOptions, replay

    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    options = ReplayOptions(
        args.url, args.model, args.vocab, args.plain, args.seed, args.timeout, headers, objective
    )  # fmt: skip
    result = replay(trace, options, _bar)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if args.json:
        print(json.dumps(result, indent=1, allow_nan=False))
    else:
        print_summary(result)
    return 0 if result["finished"] else 1


def _bar(answered: int, sent: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{sent} of {total} sent, {answered} answered", end="", file=sys.stderr, flush=True)
