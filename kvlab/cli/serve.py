"""`kvlab serve`: the engine behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import json
import sys

from kvlab.cli.engine_arguments import add_engine_arguments, engine_changes, make_engine

HELP = "serve a model over HTTP, OpenAI-compatible, with /metrics"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvlab serve`."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1, this machine)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port (default 8000); 0 is a free one")
    parser.add_argument("--served-name", default="", metavar="NAME", help="of the model, for clients")
    parser.add_argument("--max-waiting", type=int, default=256, metavar="N", help="requests in the queue; then 429")
    parser.add_argument("--max-body", default="8MiB", metavar="SIZE", help="of a call (default 8MiB); then 413")
    parser.add_argument("--drain", type=float, default=30.0, metavar="S", help="seconds for open answers at shutdown")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of requests that name none")
    parser.add_argument("--json", action="store_true", help="the line printed at the start as JSON")
    add_engine_arguments(parser, prefix="hash")


def run(args: argparse.Namespace) -> int:
    """0 after SIGINT or SIGTERM ended the server.

    Raises:
        ValueError, OSError: the arguments, the model or the port do not allow it.
    """
    from kvlab.serve.limits import ServerLimits
    from kvlab.specs.units import parse_bytes

    changes = engine_changes(args) | {"seed": args.seed}
    limits = ServerLimits(args.max_waiting, max_body_bytes=parse_bytes(args.max_body, "--max-body"), drain_s=args.drain)
    from kvlab.serve.server import bind, serve, url_of

    # a port that is taken is told before the model is read
    sock = bind(args.host, args.port)
    engine = make_engine(args, changes)
    _announce(engine, url_of(sock), args)
    serve(engine, sock, limits, args.served_name)
    return 0


def _announce(engine, url: str, args: argparse.Namespace) -> None:
    """One line on stdout when `--json`, two for people on stderr otherwise."""
    from kvlab.engine.sizing import longest_sequence

    name = args.served_name or engine.model.name
    if args.json:
        facts = {
            "url": url,
            "model": name,
            "kv_bytes": engine.kv.allocated_bytes,
            "num_blocks": list(engine.num_blocks),
        }
        print(json.dumps(facts | {"max_model_len": longest_sequence(engine)}), flush=True)
        return
    print(f"kvlab: {engine.describe()}", file=sys.stderr)
    print(f"kvlab: {name} at {url}/v1, numbers at {url}/metrics; Ctrl-C ends it", file=sys.stderr, flush=True)
