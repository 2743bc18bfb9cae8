"""What every chapter keeps, read from its text: `python tools/check_chapters.py [name]` lists what breaks a rule.

Rules: no outputs in git; at most 2,500 words; code cells of at most 15 lines; a figure or a number at least every third
cell; a stored prediction in each section before what it predicts is shown; no number with a unit in prose that no cell
asserts (decision 31); no execution setting or tag that hides a failure.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORDS, CODE_LINES, GAP = 2500, 15, 3
SHOWS = re.compile(
    r"\b(?:book\.)?(?:show\w*|say|table|spec_table|compare|claims_table|predict|setup|progress|meet|parity)\(|\bprint\(|\bdisplay\(|\bExplorer\(|\b(?:StepThrough|TraceSimulator)\b[.(]|\bplots?\.\w+\("
)
COMPARES = re.compile(r"\bcompare\(\s*[\"']([^\"']+)[\"']")
PREDICTS = re.compile(r"\bpredict\(\s*[\"']([^\"']+)[\"']")
BOUND_SPAN = re.compile(r"<span data-n=[\"']([^\"']+)[\"']>(.*?)</span>", re.S)
BOUND_CALL = re.compile(r"\bbound\(\s*[\"']([^\"']+)[\"']\s*,\s*[\"']([^\"']+)[\"']")
UNITS = (
    r"%|percent|per cent|x\b|×|times\b|(?:[KMGT]i?B|kB)(?:/s)?\b|bytes?\b|bits?\b|tokens?(?:/s| per second)?\b|ms\b|s\b|"
    r"seconds?\b|minutes?\b|GHz\b|[GT]?FLOPS?\b|sequences?\b|requests?\b|layers?\b|heads?\b|pages?\b"
)
NUMBER_WITH_UNIT = re.compile(rf"(?<![\w.$-])\d[\d,]*(?:\.\d+)?(?:\s|&nbsp;|-)?(?:billion |million )?(?:{UNITS})", re.I)
# what is not a statement about a result: code, formulas, quotes with their source, an exercise's premises, links' targets
NOT_PROSE = (
    re.compile(r"^(`{3,}|:{3,})\{(?:exercise|figure|bibliography|math)[^\n]*\n.*?^\1\s*$", re.S | re.M),
    re.compile(r"^```(?!\{).*?^```\s*$", re.S | re.M),
    re.compile(r"^(?:>[^\n]*\n?)+", re.M),
    re.compile(r"`[^`\n]*`"),
    re.compile(r"\$\$.*?\$\$|\$[^$\n]+\$", re.S),
    re.compile(r"\]\([^)]*\)"),
    re.compile(r"<!--.*?-->", re.S),
)
QUOTE_SOURCE = re.compile(r"(?:19|20)\d\d")
EXEMPT_SECTION = re.compile(r"exercise|summary|reference|where this lives|in the engines|next", re.I)


def source(cell: dict) -> str:
    """Text of a cell, whichever way it is stored."""
    text = cell["source"]
    return text if isinstance(text, str) else "".join(text)


def prose(text: str) -> str:
    """A text cell without what is not a statement of ours."""
    for pattern in NOT_PROSE:
        text = pattern.sub(" ", text)
    return text


def words(cells: list[dict]) -> int:
    """Words in the text cells, code fences and markup left out."""
    text = " ".join(
        re.sub(r"^```.*?^```", " ", source(c), flags=re.S | re.M) for c in cells if c["cell_type"] == "markdown"
    )
    return len(re.findall(r"[A-Za-z][\w'-]*", re.sub(r"<[^>]+>|\]\([^)]*\)", " ", text)))


def unbound_numbers(cells: list[dict]) -> Iterator[str]:
    """Numbers with a unit in prose that no cell prints or asserts, and bound ones that no cell asserts as printed."""
    asserted: dict[str, str] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            asserted |= dict(BOUND_CALL.findall(source(cell)))
    for index, cell in enumerate(cells):
        if cell["cell_type"] != "markdown":
            continue
        text = source(cell)
        for name, printed in BOUND_SPAN.findall(text):
            if asserted.get(name) != printed:
                yield f"cell {index}: number {name!r} prints {printed!r}; a cell binds {asserted.get(name)!r}"
        for quote in re.findall(r"(?:^>[^\n]*\n?)+", text, re.M):
            if NUMBER_WITH_UNIT.search(quote) and not QUOTE_SOURCE.search(quote):
                yield f"cell {index}: a quoted number without its source and date: {quote.strip()[:80]!r}"
        for found in NUMBER_WITH_UNIT.finditer(prose(BOUND_SPAN.sub(" ", text))):
            yield f"cell {index}: {found.group(0)!r} is bound to no cell"


def sections(cells: list[dict]) -> Iterator[tuple[str, list[tuple[int, dict]]]]:
    """Title and numbered cells of each `##` section; the opening is the section "" ."""
    title, held = "", []
    for index, cell in enumerate(cells):
        heading = re.match(r"##\s+(.*)", source(cell)) if cell["cell_type"] == "markdown" else None
        if heading:
            yield title, held
            title, held = heading.group(1), []
        held.append((index, cell))
    yield title, held


def gaps(cells: list[dict]) -> Iterator[str]:
    """Runs of three cells that show neither a figure nor a number; exercises and the closing part are exempt."""
    run = 0
    for title, held in sections(cells):
        if EXEMPT_SECTION.search(title):
            run = 0
            continue
        for index, cell in held:
            text = source(cell)
            if cell["cell_type"] == "code":
                shows = bool(SHOWS.search(text))
            else:
                shows = bool(BOUND_SPAN.search(text) or re.search(r"^\|.*\d|!\[|\$\$|<svg|^>.*\d", text, re.M))
            run = 0 if shows else run + 1
            if run == GAP:
                yield f"cell {index}: three cells in a row without a figure or a number"


def unpredicted(cells: list[dict]) -> Iterator[str]:
    """Comparisons whose prediction does not stand in an earlier cell, predictions never compared, and none at all."""
    predicted: dict[str, int] = {}
    compared: set[str] = set()
    for index, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        for key in COMPARES.findall(source(cell)):
            compared.add(key)
            if predicted.get(key, index) >= index:
                yield f"cell {index}: {key!r} is compared without a prediction in an earlier cell"
        for key in PREDICTS.findall(source(cell)):
            predicted[key] = index
    for key, index in predicted.items():
        if key not in compared:
            yield f"cell {index}: prediction {key!r} is never compared"
    if len(compared) < 2:
        yield f"{len(compared)} predictions in the chapter; each run is predicted, so at least two"


def hidden_failures(notebook: dict) -> Iterator[str]:
    """Settings and tags that let a failing cell pass, or hide one."""
    if notebook["metadata"].get("execution", {}).get("allow_errors") or "allow_errors" in notebook["metadata"]:
        yield "metadata: allow_errors"
    for index, cell in enumerate(notebook["cells"]):
        for tag in cell["metadata"].get("tags", ()):
            if tag in ("skip-execution", "raises-exception", "nbmake-skip"):
                yield f"cell {index}: tag {tag}"


def check(notebook: dict) -> list[str]:
    """All broken rules of one notebook, hidden failures apart."""
    cells = notebook["cells"]
    found = []
    if words(cells) > WORDS:
        found.append(f"{words(cells)} words; at most {WORDS}")
    for index, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        if cell.get("outputs") or cell.get("execution_count"):
            found.append(f"cell {index}: has outputs; chapters are kept without (make clean-chapters)")
        if len(source(cell).rstrip().splitlines()) > CODE_LINES:
            found.append(f"cell {index}: {len(source(cell).splitlines())} lines of code; at most {CODE_LINES}")
    return [*found, *gaps(cells), *unpredicted(cells), *unbound_numbers(cells)]


def main() -> int:
    """Prints what breaks a rule in each chapter; 1 when something does."""
    bad = 0
    for path in sorted((ROOT / "chapters").glob("*.ipynb")):
        if sys.argv[1:] and not any(name in path.name for name in sys.argv[1:]):
            continue
        notebook = json.loads(path.read_text(encoding="utf-8"))
        found = [*check(notebook), *hidden_failures(notebook)]
        print(f"{path.name}: {words(notebook['cells'])} words, {len(found)} to mend")
        print("".join(f"  {line}\n" for line in found), end="")
        bad += len(found)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
