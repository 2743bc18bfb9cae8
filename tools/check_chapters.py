"""What every chapter keeps, read from its text: `python tools/check_chapters.py [name]` lists what breaks a rule.

Rules: no outputs in git; at most 2,500 words; code cells of at most 15 lines; a figure or a number at least every third
cell; every prediction asked in an earlier cell than the one that measures what it is about; no figure written by hand in
what a picture says to those who cannot see it; no number with a unit in prose that no cell
asserts (decision 31). What could fail unseen is looked for by check_hidden.py, numbers typed into the other pages by
page_numbers.py.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import page_numbers
from check_hidden import hidden_failures

ROOT = Path(__file__).resolve().parents[1]
WORDS, CODE_LINES, GAP = 2500, 15, 3
SHOWS = re.compile(
    r"\b(?:book\.)?(?:show\w*|say|table|spec_table|compare|claims_table|predict|setup|progress|meet|parity)\(|\bprint\(|\bdisplay\(|\bExplorer\(|\b(?:StepThrough|TraceSimulator)\b[.(]|\bplots?\.\w+\("
)
IN_PLACE = ("add", "append", "extend", "generate", "step", "update")  # what measures by changing its object
ASKED = re.compile(r'data-kv-predict="([^"]+)"[^>]*></label>')
COMPARED = re.compile(r'(?s)found (-?[\d.,]*\d).*?data-kv-guess="([^"]+)"')
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
# a figure in an alt text is digits or a measure in words; names, years, lengths and batches are settings
ANY_NAME = re.compile(
    r"\b[vV]\d[\d.]*|\b[A-Za-z][\w.]*-[\w.]+\b|\b[a-z]+_?\d\w*|\b[A-Z]{1,4}\d[\w.]*|\b\d+B\b|\b(?:19|20)\d\d\b"
    r"|\b\d+[kM]\b|\bbatch \d+"
)
COUNT = "two|three|four|five|six|seven|eight|nine|ten|sixteen|twenty|hundred|thousand"
TYPED_FIGURE = re.compile(
    rf"\d[\d.,]*|\b(?:half|a third|quarter|fifth|tenths?|twice|(?:{COUNT})(?:fold|s)|(?:{COUNT}) (?:times|to)|over a hundred)\b",
    re.I,
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
        heading = re.search(r"^##\s+(.*)", source(cell), re.M) if cell["cell_type"] == "markdown" else None
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


def measured_names(tree: ast.Module) -> set[str]:
    """Names that a cell gives a value, or changes in place; functions and imports measure nothing by themselves."""
    found = set()
    for node in ast.walk(tree):
        target = node.func if isinstance(node, ast.Call) else node
        stores = isinstance(getattr(node, "ctx", None), ast.Store)
        if stores or (isinstance(target, ast.Attribute) and target is not node and target.attr in IN_PLACE):
            while isinstance(target, ast.Attribute | ast.Subscript):
                target = target.value
            if isinstance(target, ast.Name):
                found.add(target.id)
    return found


def only_reads(value: ast.expr, known: Iterable[str]) -> bool:
    """Whether an expression takes values from what is there: it calls builtins and methods of known values alone."""
    for node in ast.walk(value):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in IN_PLACE:
                return False
            names = [n.id for n in ast.walk(node.func) if isinstance(n, ast.Name)]
            if not all(name in known or name in dir(builtins) for name in names):
                return False
    return True


def measured_at(tree: ast.Module, index: int, known: dict[str, int]) -> dict[str, int]:
    """`known`, in which cell each name was measured, after this cell; a name for what was there is as old as that.

    Functions that a chapter writes or imports measure, whatever they are given. So a value that such a function only
    looks up in what an earlier cell measured counts as new: that stays for the reader of a chapter to see.
    """
    known = dict(known)
    for statement in tree.body:
        at = index
        if isinstance(statement, ast.Assign) and only_reads(statement.value, known):
            read = {node.id for node in ast.walk(statement.value) if isinstance(node, ast.Name)}
            at = max((known[name] for name in read if name in known), default=index)
        known |= {name: at for name in measured_names(ast.Module([statement], []))}
    return known


def calls_of(tree: ast.Module, name: str) -> Iterator[tuple[str, ast.Call]]:
    """Key and call of every `name("key", ...)` or `book.name("key", ...)`."""
    for node in ast.walk(tree):
        called = getattr(node, "func", None)
        key = node.args[0] if called is not None and node.args else None
        if isinstance(key, ast.Constant) and getattr(called, "attr", getattr(called, "id", "")) == name:
            yield str(key.value), node


def unpredicted(cells: list[dict]) -> Iterator[str]:
    """Comparisons with what was measured before it was asked, predictions never compared, and none at all."""
    predicted: dict[str, int] = {}
    measured: dict[str, int] = {}
    compared: set[str] = set()
    for index, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse(source(cell))
        predicted |= {key: index for key, _ in calls_of(tree, "predict")}
        measured = measured_at(tree, index, measured)
        for key, call in calls_of(tree, "compare"):
            compared.add(key)
            if predicted.get(key, index) >= index:
                yield f"cell {index}: {key!r} is compared without a prediction in an earlier cell"
                continue
            names = {n.id for n in ast.walk(call) if isinstance(n, ast.Name)} - set(dir(builtins))
            found = {name: measured[name] for name in names if name in measured}
            # without a measured name the cell itself computes the value
            if found and max(found.values()) <= predicted[key]:
                where = ", ".join(f"{name} in cell {at}" for name, at in sorted(found.items()))
                yield f"cell {predicted[key]}: {key!r} is asked after it was measured ({where})"
    for key, index in predicted.items():
        if key not in compared:
            yield f"cell {index}: prediction {key!r} is never compared"
    if len(compared) < 2:
        yield f"{len(compared)} predictions in the chapter; each run is predicted, so at least two"


def told_before(executed: list[dict]) -> Iterator[str]:
    """Results with three digits or more that an executed chapter shows, in the same section, before it asks for them."""
    for _, held in sections(executed):
        said, asked = "", {}
        for index, cell in held:
            shown = [source(cell)] if cell["cell_type"] == "markdown" else []
            for output in cell.get("outputs", ()):
                data = {
                    k: v if isinstance(v, str) else "".join(v) for k, v in output.get("data", {}).items() if "text" in k
                }
                page = data.get("text/html", "")
                for value, key in COMPARED.findall(page):
                    digits = re.sub(r"\D", "", value).strip("0")
                    before = re.compile(rf"(?<![\d.,]){re.escape(value)}(?!\d|[.,]\d)")
                    if len(digits) >= 3 and key in asked and before.search(asked[key]):
                        yield f"cell {index}: the {value} that {key!r} asks for was shown before"
                asked |= {key: "\n".join([said, *shown]) for key in ASKED.findall(page)}
                shown += ["".join(output.get("text", ())) or data.get("text/plain", "")]
            said = "\n".join([said, *shown])


def typed_alts(cells: list[dict]) -> Iterator[str]:
    """Figures in what a picture says that stand there as typed, not as computed."""
    for index, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        for node in ast.walk(ast.parse(source(cell))):
            if isinstance(node, ast.keyword) and node.arg == "alt":
                parts = node.value.values if isinstance(node.value, ast.JoinedStr) else [node.value]
                typed = " ".join(str(p.value) for p in parts if isinstance(p, ast.Constant))
                for found in TYPED_FIGURE.finditer(ANY_NAME.sub(" ", typed)):
                    yield f"cell {index}: {found.group(0)!r} in an alt text is typed, not computed"


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
    return [*found, *gaps(cells), *unpredicted(cells), *typed_alts(cells), *unbound_numbers(cells)]


def main() -> int:
    """Prints what breaks a rule in each chapter; 1 when something does."""
    bad = 0
    for path in sorted((ROOT / "chapters").glob("*.ipynb")):
        if sys.argv[1:] and not any(name in path.name for name in sys.argv[1:]):
            continue
        notebook = json.loads(path.read_text(encoding="utf-8"))
        found = list(hidden_failures(notebook)) or check(notebook)  # what is no Python cannot be read further
        print(f"{path.name}: {words(notebook['cells'])} words, {len(found)} to mend")
        print("".join(f"  {line}\n" for line in found), end="")
        bad += len(found)
    for path, found in page_numbers.typed():
        print(f"{path.name}: {found}")
        bad += 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
