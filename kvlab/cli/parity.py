"""`kvlab parity`: kvlab's logits against transformers' on a small random model of a config."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlab.lab.parity import Report

HELP = "compare kvlab's logits with transformers' on a small random model of a config.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to `parser`."""
    parser.add_argument("config", help="a config.json, or the folder that holds it")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts (default 0)")
    parser.add_argument("--all-layers", action="store_true", help="keep every layer, not one period of their pattern")
    parser.add_argument("--mutations", action="store_true", help="also change each fact alone: parity must then fail")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """0 when every mode is within tolerance (and every mutation outside), else 1.

    Raises:
        ValueError: not a config, or an architecture the engine does not run (exit code 2).
    """
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed {args.seed}: must be at least 0 and below 2**63")
    config = _read(Path(args.config))
    from kvlab.models.facts import ModelConfig

    # before transformers is imported, so that "unsupported" is quick
    ModelConfig.from_hf(config)
    _quiet()
    from kvlab.lab.parity import run_parity

    report = run_parity(config, seed=args.seed, all_layers=args.all_layers, mutations=args.mutations)
    print(json.dumps(report.to_json(), indent=2) if args.json else describe(report, args.config))
    return 0 if report.passed else 1


def _read(path: Path) -> dict:
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    # how a published checkpoint is stored says nothing about what its layers compute: weights here are random
    return {name: value for name, value in config.items() if name != "quantization_config"}


def _quiet() -> None:
    """Keeps transformers' remarks about unusual configs out of the report."""
    from transformers.utils import logging

    logging.set_verbosity_error()


def describe(report: Report, source: str) -> str:
    """The report for people."""
    small = report.shrunk
    lines = [f"{source} ({small.config['model_type']}), seed {report.seed}", "", "shrunk:"]
    lines += [f"  {name:<24} {_short(old):>28} -> {_short(new)}" for name, old, new in small.changes]
    lines += [
        f"  layers kept              {list(small.kept_layers)}",
        f"  attention entropy        {_entropy(report)}",
        "",
        f"max |difference| / std(logits), tolerance {report.modes[0].tolerance:g}:",
    ]
    lines += [f"  {m.mode:<24} {m.error:.1e}  {'ok' if m.passed else 'FAIL'}" for m in report.modes]
    if report.mutations:
        lines += ["", "each fact changed alone; parity must fail:"]
        lines += [f"  {m.mode:<56} {m.error:.1e}  {'seen' if m.seen else 'NOT SEEN'}" for m in report.mutations]
    lines += ["", *(f"note: {note}" for note in report.notes)] if report.notes else []
    return "\n".join([*lines, "", "parity " + ("holds" if report.passed else "FAILS")])


def _entropy(report: Report) -> str:
    fraction = report.entropy_fraction
    return "no attention" if fraction is None else f"{fraction:.2f} of its maximum (under 0.50)"


def _short(value: object) -> str:
    text = "-" if value is None else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
