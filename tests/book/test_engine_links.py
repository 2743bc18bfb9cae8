"""Where a chapter says "this lives there": every engine carries its version, every file and symbol of ours exists.

transformers is installed, so its files and symbols are looked up in it; vLLM and SGLang are not, and only the version that
was read is held to be one and the same in the whole book.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted((ROOT / "chapters").glob("*.ipynb"))
PART = re.compile(r"(?:^|(?<=[.;] ))(vLLM|SGLang|transformers|kvlab)(?:( \d+(?:\.\d+)*)(?=[:,]| keeps)|(?=:))", re.M)
OURS = (ROOT / "kvlab", ROOT)
COMMAND = re.compile(r"kvlab [a-z]|-|\.venv")


def paragraphs(path: Path) -> Iterator[str]:
    """The text cells that name files of an engine."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown" and len(PART.findall(text)) > 1:
            yield text


def parts(text: str) -> Iterator[tuple[str, str, str]]:
    """Engine, version and what is said of it, one after another."""
    found = list(PART.finditer(text))
    for this, following in zip(found, [*found[1:], None], strict=True):
        said = text[this.end() : following.start() if following else len(text)]
        yield this.group(1), (this.group(2) or "").strip(), said


def unresolved(said: str, folders: tuple[Path, ...]) -> list[str]:
    """What is named in backticks and is neither a file below `folders` nor a word in the files named beside it."""
    names = [name for name in re.findall(r"`([^`]+)`", said) if not COMMAND.match(name)]
    found: dict[str, list[Path]] = {}
    for name in names:
        near = [place if place.is_dir() else place.parent for places in found.values() for place in places]
        places = [place for folder in (*folders, *near) for place in folder.glob(name.rstrip("/"))]
        places += sorted(folders[0].rglob(name)) if name.endswith(".py") and "/" not in name and not places else []
        if places:
            found[name] = places
    named = {place for places in found.values() for place in places}
    # a folder whose parts are named too is only where they are
    read = [p for p in named if p.is_file() or not any(p in other.parents for other in named)]
    files = [file for place in read for file in ([place] if place.is_file() else place.rglob("*.py"))]
    words = {word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}
    symbols = {n for n in names if "/" not in n and not n.endswith(".py") and set(re.findall(r"\w+", n)) <= words}
    return [name for name in names if name not in found and name not in symbols]


def test_the_check_sees_what_is_gone() -> None:
    said = "`kvlab/cache/pool.py`, `BlockPool.nowhere`, `manager.py`, `none.py` and `kvlab/nowhere/`; `kvlab plan`"
    assert unresolved(said, OURS) == ["BlockPool.nowhere", "none.py", "kvlab/nowhere/"]
    text = "vLLM 0.33: `a.py`. SGLang: `b/`; kvlab: `c.py`"
    assert [part[:2] for part in parts(text)] == [("vLLM", "0.33"), ("SGLang", ""), ("kvlab", "")]


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_every_file_and_symbol_that_a_chapter_names_is_there(path) -> None:
    found = [part for text in paragraphs(path) for part in parts(text)]
    assert any(engine == "kvlab" for engine, *_ in found)
    for engine, version, said in found:
        if engine == "kvlab":
            assert unresolved(said, OURS) == []
        else:
            assert version, f"{engine} without the version that was read: {said[:60]}"
        if engine == "transformers":
            assert importlib.metadata.version("transformers").startswith(version + ".")
            package = Path(importlib.util.find_spec("transformers").origin).parent
            assert unresolved(said, (package, package / "models")) == []


def test_one_version_of_each_engine_was_read() -> None:
    read = {part[:2] for path in CHAPTERS for text in paragraphs(path) for part in parts(text) if part[0] != "kvlab"}
    assert len(read) == len({engine for engine, _ in read}) == 3
