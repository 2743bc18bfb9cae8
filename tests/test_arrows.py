"""Imports inside kvlab point downwards only (design.md, decision 4), read from the source without importing it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KVLAB = ROOT / "kvlab"
# from the ground up; a room may import itself and the rooms named
BELOW: dict[str, set[str]] = {"specs": set()}
BELOW["plan"] = {"specs"}
BELOW["cache"] = {"specs"}
BELOW["schedule"] = {"specs", "cache"}
BELOW["quant"] = {"specs"}
BELOW["ops"] = {"specs", "quant"}
BELOW["models"] = {"specs", "quant", "ops"}
BELOW["engine"] = {"specs", "plan", "cache", "schedule", "quant", "ops", "models"}
BELOW["speculate"] = BELOW["engine"] | {"engine"}
BELOW["serve"] = BELOW["speculate"] | {"speculate"}
BELOW["simulate"] = {"specs", "plan", "cache", "schedule"}
BELOW["lab"] = BELOW["serve"] | {"serve", "simulate"}
BELOW["widgets"] = BELOW["lab"] | {"lab"}
BELOW["book"] = BELOW["widgets"] | {"widgets"}
BELOW["cli"] = BELOW["book"] | {"book"}
# the hub is asked only when it is installed and the name is in no catalogue
OPTIONAL = {("resolve.py", "huggingface_hub")}
PURE = ("specs", "plan", "cache", "schedule", "simulate")
# the explorer shows recorded results, which only kvlab.book.results reads; it imports them when it is built
ALLOWED = {("widgets", "book"), ("lab", "book")}


def imports(path: Path) -> set[str]:
    """Names of all modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files(room: str) -> list[Path]:
    return sorted((KVLAB / room).rglob("*.py"))


@pytest.mark.parametrize("room", BELOW)
def test_arrows_point_downwards(room) -> None:
    upwards = set()
    for path in files(room):
        for name in imports(path):
            top, _, rest = name.partition(".")
            other = rest.split(".")[0]
            if top == "kvlab" and (KVLAB / other).is_dir() and other not in BELOW[room] | {room, ""}:
                upwards.add((str(path.relative_to(ROOT)), other))
    assert {(p, o) for p, o in upwards if (room, o) not in ALLOWED} == set()


@pytest.mark.parametrize("room", PURE)
def test_pure_rooms_import_only_the_standard_library(room) -> None:
    tops = {(path.name, name.split(".")[0]) for path in files(room) for name in imports(path)}
    assert {(p, n) for p, n in tops if n not in sys.stdlib_module_names | {"kvlab"}} <= OPTIONAL


def test_every_room_is_in_the_table() -> None:
    assert {p.name for p in KVLAB.iterdir() if p.is_dir() and any(p.glob("*.py"))} <= set(BELOW)


def loaded(statement: str, names: tuple[str, ...]) -> list[str]:
    """Which of `names` are imported once `statement` has run in a fresh interpreter."""
    code = f"import sys\n{statement}\nprint([n for n in {names!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return ast.literal_eval(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(
    ("statement", "never"),
    [
        ("import kvlab", ("torch", "numpy", "kvlab.specs", "kvlab.engine")),
        ("import kvlab.engine", ("transformers", "gguf", "plotly", "anywidget", "fastapi")),
        ("import kvlab.specs.families, kvlab.plan, kvlab.cache, kvlab.schedule", ("torch", "numpy", "transformers")),
        ("from kvlab.cli import main; main(['--help'])", ("torch", "numpy", "kvlab.plan", "kvlab.specs")),
        ("from kvlab.cli import main; main(['plan', 'llama-3.1-70b', '--json'])", ("torch", "numpy", "transformers")),
    ],
    ids=["kvlab", "engine", "pure rooms", "kvlab --help", "kvlab plan"],
)
def test_what_an_import_does_not_bring(statement, never) -> None:
    assert loaded(statement, never) == []
