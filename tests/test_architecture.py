"""ARCHITECTURE.md names every module of kvlab, and nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_module_is_listed_and_every_link_leads_somewhere() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\((kvlab/[^)]+\.py)\)", page))
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "kvlab").glob("*/**/*.py")}
    assert modules - listed == set(), "run `python tools/architecture.py`"
    assert listed - modules == set(), "run `python tools/architecture.py`"


def test_every_module_says_what_it_is() -> None:
    silent = [p for p in (ROOT / "kvlab").rglob("*.py") if not p.read_text(encoding="utf-8").lstrip().startswith('"""')]
    assert silent == []


def test_readme_names_only_targets_that_make_has() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    pages = [ROOT / "README.md", *(ROOT / "book").glob("*.md")]
    named = {
        name for page in pages for name in re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.M)
    }
    assert named and named <= targets
