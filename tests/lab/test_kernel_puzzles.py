"""The kernel puzzles: their tests pass on the solutions and fail on every empty kernel, with a message for the learner."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is for Linux only")

FOLDER = Path(__file__).parents[2] / "exercises" / "kernels"


def run(module: str) -> str:
    environment = os.environ | {"KVLAB_PUZZLES": module, "TRITON_INTERPRET": "1"}
    call = [sys.executable, "-m", "pytest", str(FOLDER), "-p", "no:cacheprovider", "-W", "ignore", "-v", "--tb=line"]
    return subprocess.run(call, capture_output=True, text=True, env=environment, check=False).stdout


def test_solutions_pass() -> None:
    found = run("solutions")
    assert "19 passed" in found and "failed" not in found, found


def test_empty_kernels_fail_and_say_so() -> None:
    found = run("puzzles")
    assert "19 failed" in found, found
    tasks = set(re.findall(r"test_task_(\d)", found))
    assert tasks == set("123456")
    assert "nothing was written" in found


def test_a_puzzle_and_its_solution_have_one_specification() -> None:
    puzzles, solutions = ((FOLDER / f"{n}.py").read_text(encoding="utf-8") for n in ("puzzles", "solutions"))
    specification = re.compile(r'def \w+\(\n.*?\n\):.*?""".*?"""', re.S)
    assert specification.findall(puzzles) == specification.findall(solutions)
    assert puzzles.count("pass  # your kernel") == 6
