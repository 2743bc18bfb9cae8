"""Numbers in the book's text pages (book/*.md): a page names one as {{name}}, the build computes it and fills it in."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(r"\{\{\s*(\w+)\s*\}\}")


def page_python() -> str:
    """What the first touch of a control loads: Python for the browser and the pure part of kvlab."""
    import assets

    with tempfile.TemporaryDirectory() as folder:
        assets.zip_kvlab(Path(folder))
        files = [*Path(folder).iterdir(), *(assets.MODULES / "pyodide" / name for name in assets.PYODIDE_FILES)]
        return f"{sum(path.stat().st_size for path in files) / 1e6:.0f} MB"


def default_weight_bits() -> str:
    """Bits per weight of the default model's file, as its note says."""
    from kvlab.models.convert import DEFAULT, PACKAGED

    return re.match(r"(\d+)-bit ", PACKAGED[DEFAULT].note).group(1) + " bits"


def chapter_words() -> str:
    """Words of the shortest and of the longest chapter, to the nearest hundred."""
    import check_chapters

    notebooks = sorted((ROOT / "chapters").glob("*.ipynb"))
    counts = [check_chapters.words(json.loads(p.read_text(encoding="utf-8"))["cells"]) for p in notebooks]
    return f"{round(min(counts), -2):,} to {round(max(counts), -2):,}"


NUMBERS: dict[str, Callable[[], str]] = {f.__name__: f for f in (page_python, default_weight_bits, chapter_words)}


def filled(text: str) -> str:
    """The text of a page with its numbers in place.

    Raises:
        ValueError: it names a number that is not in NUMBERS.
    """

    def number(found: re.Match[str]) -> str:
        if found.group(1) not in NUMBERS:
            raise ValueError(f"{found.group(0)}: no such number; there are {', '.join(NUMBERS)}")
        return NUMBERS[found.group(1)]()

    return PLACE.sub(number, text)


def pages() -> list[Path]:
    """The text pages of the book."""
    return sorted((ROOT / "book").glob("*.md"))


def typed() -> Iterator[tuple[Path, str]]:
    """Page and place of every number with a unit that is typed there, not computed by the build."""
    import check_chapters

    for path in pages():
        cell = {"cell_type": "markdown", "source": PLACE.sub(" ", path.read_text(encoding="utf-8"))}
        yield from ((path, line.split(": ", 1)[1]) for line in check_chapters.unbound_numbers([cell]))
