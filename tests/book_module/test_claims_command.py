"""`kvlab claims`, as a reader runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvlab.book.claims import entries
from kvlab.book.claims.verdict import VERDICTS


def kvlab(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kvlab", "claims", *arguments], capture_output=True, text=True)


def test_json_holds_the_ledger() -> None:
    ended = kvlab("--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    found = json.loads(ended.stdout)
    assert [(c["id"], c["verdict"], c["recomputed"], c["correction"]) for c in found] == [
        (e.id, e.verdict, e.recomputed, e.correction) for e in entries()
    ]
    assert {c["verdict"] for c in found} == set(VERDICTS)


def test_one_chapter_in_words() -> None:
    ended = kvlab("--chapter", "1")
    assert ended.returncode == 0
    assert "guide.takeaways.42gb-exceeds-h100" in ended.stdout and "guide.mental" not in ended.stdout
    assert ended.stdout.splitlines()[-1].startswith("8 claims: ")


@pytest.mark.parametrize("arguments", [("--chapter", "99"), ("--chapter", "99", "--json")])
def test_a_chapter_without_claims_is_one_line_and_code_2(arguments) -> None:
    ended = kvlab(*arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "kvlab: chapter 99: no claims are recorded for it yet\n"


def test_the_ledger_needs_neither_torch_nor_numpy() -> None:
    code = "import sys; from kvlab.book.claims import entries; entries(); print({'torch', 'numpy'} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "set()\n", ended.stderr
