"""`kvlab kernels`: the Triton kernels compiled for GPUs that need not be there, and what the compiled code says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HELP = "compile the Triton kernels ahead of time and report registers, loads, tensor cores, bytes and roofline"
RESULT = Path("book/results/kernels.json")
ARCHS = "sm_80,sm_90,sm_100,gfx942"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvlab kernels`."""
    parser.add_argument(
        "--arch", default=ARCHS, metavar="LIST", help=f"targets, separated by commas (default: {ARCHS})"
    )
    parser.add_argument("--all", action="store_true", help="every configuration on every target, not CI's alone")
    parser.add_argument("--only", default="", metavar="TEXT", help="configurations whose name contains this")
    parser.add_argument("--list", action="store_true", help="names and targets, without compiling")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--save", action="store_true", help=f"write {RESULT} (run from the checkout)")


def run(args: argparse.Namespace) -> int:
    """0, or 1 when a configuration breaks a rule that no exception covers.

    Raises:
        ValueError: an unknown target, no configuration of that name, or TRITON_INTERPRET set.
    """
    from kvlab.lab.kernels import configs, report
    from kvlab.lab.kernels.compiling import get_target

    archs = args.arch.split(",")
    chosen = [c for c in configs.configs() if args.only in c.name]
    if not chosen:
        raise ValueError(f"only {args.only!r}: no configuration has it in its name")
    for arch in archs:
        get_target(arch)
    if args.list:
        names = {c.name: own for c in chosen if (own := [a for a in c.archs if a in archs])}
        print(
            json.dumps(names, indent=1) if args.json else "\n".join(f"{n:38} {','.join(a)}" for n, a in names.items())
        )
        return 0
    rows = list(report.rows(chosen, archs, args.all))
    if args.save or args.json:
        from kvlab.lab.record import provenance

        record = provenance("kvlab kernels --json", ("torch", "triton"))
        record |= {"what": "the Triton kernels compiled ahead of time: what the compiled code says", "rows": rows}
        record["device"] = "none: compiled ahead of time"
        if args.save:
            RESULT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1) if args.json else report.table(rows))
    return 1 if any(r["broken"] for r in rows) else 0
