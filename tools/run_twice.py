"""Runs every cell of a chapter twice in one kernel, all of them and then all again, as a reader does who changes a guess.

`python tools/run_twice.py [part of a name ...]`: a cell that fails the second time fails; one whose output has other
numbers than the first time is told, since measured times differ from run to run.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import run_chapters

TWICE = run_chapters.RUN.parent / "twice"


def doubled(notebook: dict) -> dict:
    """The code cells of a chapter, and after them the same again."""
    again = copy.deepcopy(notebook)
    code = [cell for cell in again["cells"] if cell["cell_type"] == "code"]
    second = copy.deepcopy(code)
    for number, cell in enumerate(second):
        cell["id"] = f"again-{number}"
    again["cells"] = code + second
    return again


def shown(cell: dict) -> str:
    """The text that a cell showed, without addresses of objects."""
    parts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.get("outputs", ())]
    return re.sub(r" at 0x[0-9a-f]+", "", "".join("".join(part) for part in parts))


def other_numbers(executed: dict) -> Iterator[str]:
    """Cells that showed other numbers the second time, with the first line in which they did."""
    half = len(executed["cells"]) // 2
    for number in range(half):
        first, second = (shown(executed["cells"][n]).splitlines() for n in (number, half + number))
        for before, after in zip(first, second, strict=False):
            if re.findall(r"\d[\d.,]*", before) != re.findall(r"\d[\d.,]*", after):
                yield f"code cell {number}: {before.strip()[:100]!r}, then {after.strip()[:100]!r}"
                break


def run_twice(source: Path) -> list[str]:
    """What went wrong, a line each; prints which cells showed other numbers."""
    target = TWICE / source.name
    target.write_text(json.dumps(doubled(json.loads(source.read_text(encoding="utf-8")))), encoding="utf-8")
    if problem := run_chapters.execute(target):
        return [problem]
    executed = json.loads(target.read_text(encoding="utf-8"))
    for line in other_numbers(executed):
        print(f"{source.name}: other numbers: {line}", flush=True)
    return run_chapters.failures_nbmake_passes(executed)


def main() -> int:
    """Runs the chapters named, or all; 1 when one of them failed."""
    TWICE.mkdir(parents=True, exist_ok=True)
    run_chapters.NOTEBOOK_SECONDS *= 2
    bad = 0
    for path in run_chapters.chapters():
        if sys.argv[1:] and not any(name in path.name for name in sys.argv[1:]):
            continue
        found = run_twice(path)
        print("\n".join([f"{path.name}: {'failed' if found else 'ran twice'}", *found]), flush=True)
        bad += bool(found)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
