"""Recorded measurements: JSON files in book/results, each with its provenance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

REQUIRED = ("what", "date", "commit", "device", "versions", "command")


def results_dir() -> Path:
    """The folder of recorded results of this checkout."""
    return Path(__file__).resolve().parents[2] / "book" / "results"


def load_result(name: str) -> dict[str, Any]:
    """The recorded result `name` (a file book/results/NAME.json).

    Raises:
        FileNotFoundError: nothing of that name is recorded.
        ValueError: the file lacks a provenance field.
    """
    path = results_dir() / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in results_dir().glob("*.json"))) or "none"
        raise FileNotFoundError(f"result {name!r}: not recorded (recorded: {known})")
    result = json.loads(path.read_text(encoding="utf-8"))
    if missing := [field for field in REQUIRED if field not in result]:
        raise ValueError(f"result {name!r}: lacks {', '.join(missing)}")
    return result


def provenance(result: dict[str, Any]) -> str:
    """One line for a caption: device, versions, commit and date of a recorded result."""
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    return f"Recorded on {result['device']} ({versions}), commit {result['commit'][:10]}, {result['date']}."
