"""The `kvlab` command: one module per command, imported only when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS: dict[str, str] = {
    "plan": "size a model's cache: bytes, how many sequences fit, how fast",
    "generate": "generate text with the engine",
    "parity": "compare a tiny model of a family with transformers",
    "bench": "time the engine",
    "claims": "recompute the claims of the two texts and print the verdicts",
    "doctor": "what is installed and what will run where",
}
"""command -> help line; the command is the module `kvlab.cli.<command>`, not imported to list it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; its code, or 2 and one line on stderr for bad input."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="kvlab", description="The KV Cache Lab's engine and planner.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, line in COMMANDS.items():
        command = commands.add_parser(name, help=line)
        if given[:1] == [name]:
            importlib.import_module(f"kvlab.cli.{name}").add_arguments(command)
    args = parser.parse_args(given)
    try:
        return importlib.import_module(f"kvlab.cli.{args.command}").run(args)
    except (ValueError, OSError) as error:
        print(f"kvlab: {error}", file=sys.stderr)
        return 2
