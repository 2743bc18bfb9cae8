"""The status page: when and on what each chapter ran, and which measurements are on record."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / "build" / "run"
RESULTS = ROOT / "book" / "results"

INTRO = """# Status

Every chapter of this book is executed before the book is built, and the build stops when one fails. This page is written
by the build: it says when each chapter ran, on what, how long all of it took with the start of its kernel, how much memory
that kernel held at most, and which recorded measurements the chapters quote.
"""


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(c).replace("|", "\\|") for c in row) + " |" for row in rows])


def chapter_rows() -> list[list[str]]:
    """One row per executed chapter: name, result, seconds, memory, date, commit."""
    rows = []
    for path in sorted(RUN.glob("*.json")):
        record = json.loads(path.read_text())
        name = f"[{record['chapter']}](chapters/{record['chapter']})"
        peak = f"{record['peak_bytes'] / 2**30:.1f} GiB" if record.get("peak_bytes") else "not recorded"
        here = [f"{record['seconds']:.0f} s", peak, record["date"], record["machine"]["commit"]]
        rows.append([name, record["result"], *here])
    return rows


def conditions(record: dict) -> str:
    """What one chapter ran on and with which versions, as its run noted it."""
    here = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items())
    return f"{here['cpu']}, {here['cores']} cores, {here['system']}, Python {here['python']}. {versions}."


def machine_lines() -> str:
    """The conditions of the newest run, and those of every chapter that ran under others."""
    records = [json.loads(p.read_text()) for p in sorted(RUN.glob("*.json"))]
    if not records:
        return "No chapter has run yet."
    newest = conditions(max(records, key=lambda r: r["date"]))
    others = [f"- {r['chapter']} ran on: {conditions(r)}" for r in records if conditions(r) != newest]
    return "\n".join([newest, *([""] if others else []), *others])


def result_rows() -> list[list[str]]:
    """One row per recorded measurement of book/results with its provenance."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            sys.exit(f"status page: {path}: {error}")
        about = [str(result.get(field, "not recorded")) for field in ("what", "date", "commit", "device", "command")]
        rows.append([f"`{path.stem}`", about[0], about[1], about[2][:10], about[3], f"`{about[4]}`"])
    return rows


def page() -> str:
    """The whole page, in Markdown."""
    parts = [
        INTRO,
        "## Chapters",
        machine_lines(),
        table(["chapter", "result", "time", "memory", "ran", "commit"], chapter_rows()),
    ]
    parts += [
        "## Recorded measurements",
        "What takes a GPU, minutes, or a quiet machine is measured once and kept with its conditions. "
        "The command in the last column measures it again.",
    ]
    rows = result_rows()
    head = ["name", "what", "date", "commit", "device", "command"]
    parts.append(table(head, rows) if rows else "None yet.")
    return "\n\n".join(parts) + "\n"
