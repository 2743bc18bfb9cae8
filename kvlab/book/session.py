"""The opening cell of a chapter, sentences with computed numbers, tables, progress bars."""

from __future__ import annotations

import html
import importlib.metadata
import os
import platform
import random
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import kvlab

Item = TypeVar("Item")


def setup(chapter: int, *, seed: int = 0) -> None:
    """Seeds Python, NumPy and torch (where imported) and prints what this chapter runs on.

    Raises:
        ValueError: chapter is not a section number of the guide, 1 to 25.
    """
    if not 1 <= chapter <= 25:
        raise ValueError(f"chapter {chapter}: must be 1 to 25")
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    versions = [f"kvlab {kvlab.__version__}", f"Python {platform.python_version()}"]
    for name in ("torch", "transformers"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    print(f"chapter {chapter} · seed {seed} · {', '.join(versions)} · {os.cpu_count()} CPU cores")


def _display(bundle: dict) -> None:
    """Shows a mime bundle in a notebook; prints its plain text anywhere else."""
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        print(bundle["text/plain"])
        return
    if get_ipython() is None:
        print(bundle["text/plain"])
    else:
        display(bundle, raw=True)


def say(text: str) -> None:
    """Shows `text`, a sentence or two whose numbers the cell has just computed, as Markdown."""
    _display({"text/markdown": text, "text/plain": text})


def bound(number_id: str, printed: str, computed: str) -> None:
    """Holds the number that prose prints under `number_id` to what the cell computed.

    Raises:
        ValueError: the two texts differ, so the prose is wrong.
    """
    if printed != computed:
        raise ValueError(f"number {number_id!r}: the text prints {printed!r}, the run gives {computed!r}")


def table(rows: Iterable[Sequence[Any]], head: Sequence[str], *, caption: str) -> None:
    """Shows rows as a table that scrolls inside its own box; numbers are aligned right."""
    rows = [list(row) for row in rows]
    lines = ["<thead><tr>" + "".join(f'<th scope="col">{html.escape(h)}</th>' for h in head) + "</tr></thead><tbody>"]
    for row in rows:
        cells = []
        for cell in row:
            numeric = isinstance(cell, int | float) and not isinstance(cell, bool)
            shown = f"{cell:,}" if isinstance(cell, int) and numeric else str(cell)
            cells.append(f"<td{' class=num' if numeric or _looks_numeric(shown) else ''}>{html.escape(shown)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "".join(lines) + "</tbody>"
    markup = (
        f'<div class="kv-table" tabindex="0" role="region" aria-label="{html.escape(caption)}"><table>'
        f"<caption>{html.escape(caption)}</caption>{body}</table></div>"
    )
    plain = "\n".join(["  ".join(head), *("  ".join(map(str, row)) for row in rows)])
    _display({"text/html": markup, "text/plain": f"{caption}\n{plain}"})


def _looks_numeric(text: str) -> bool:
    """Whether `text` is one number or range, perhaps with a unit: "~3", "5-6", "10.00 GiB"; not "3 sliding windows"."""
    return re.fullmatch(r"[-+~]?\d[\d,.]*(?:-\d[\d,.]*)?(?: ?(?:%|[A-Za-z/]{1,8}))?", text) is not None


def progress(items: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
    """Yields `items` under a progress bar; silent in a build, where no one watches."""
    if os.environ.get("KVLAB_BUILD"):
        yield from items
        return
    from tqdm.auto import tqdm

    yield from tqdm(items, desc=label, total=total, leave=False)
