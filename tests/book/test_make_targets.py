"""What `make` does before each target, and that CI's script ends in time; nothing is made here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
NEEDS_NO_MODEL = {"lint", "format", "env"}
NEEDS_NO_PAGES = {*NEEDS_NO_MODEL, "lab", "lab-setup", "gemma"}


def targets() -> list[str]:
    """The targets that `make help` shows."""
    return re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)


def would_run(target: str, *variables: str) -> list[str]:
    """The commands of a target, as `make -n` prints them."""
    call = ["make", "-n", "PYTHON=python3", *variables, target]
    return subprocess.run(call, cwd=ROOT, env=CLEAN, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("target", [t for t in targets() if t != "bench-gpu"])
def test_a_target_sets_up_all_that_it_uses_before_it_uses_it(target) -> None:
    commands = would_run(target)
    uses = [i for i, c in enumerate(commands) if ".venv/bin/" in c]
    setups = [i for i, c in enumerate(commands) if "tools/setup_env.py" in c and ".venv/bin/" not in c]
    if target == "test":  # its own set-up: the first job of tools/ci.py
        assert not uses and "tools/ci.py" in commands[0]
        return
    if not uses and target not in ("env", "lab-setup"):
        assert target in ("help", "clean", "distclean", "clean-chapters", "check-chapters")
        return
    assert setups and setups[0] < min(uses, default=len(commands))
    if target not in NEEDS_NO_MODEL:
        assert {"--model", "--kernel"} <= set(commands[setups[0]].split())
    if target not in NEEDS_NO_PAGES:
        assert "tools/assets.py" in commands[uses[0]]


def test_the_gpu_bench_fetches_nothing(tmp_path) -> None:
    """It runs with the environment that is there, else with PYTHON, and says what that lacks."""
    for venv, python in (("none", "python3"), (str(tmp_path), f"{tmp_path}/bin/python")):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / "python").touch()
        commands = would_run("bench-gpu", f"VENV={venv}", "STAGE=copy")
        assert commands[-1] == f"{python} -m kvlab.lab.bench_gpu --stage copy"
        assert not [c for c in commands if "tools/" in c or "pip" in c]
    bare = tmp_path / "bin" / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    call = ["make", f"VENV={tmp_path}", "bench-gpu"]
    done = subprocess.run(call, cwd=ROOT, env=CLEAN, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "needs torch >= 2.11, triton >= 3.6 and numpy" in done.stderr


@pytest.mark.skipif(not shutil.which("timeout"), reason="GNU timeout is not installed")
def test_ci_has_a_hard_end_and_says_so(tmp_path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    for recipe, code, said in (("sleep 60", 124, "stopped after 1 s"), ("exit 3", 2, ""), ("true", 0, "")):
        (tmp_path / "Makefile").write_text(f"test:\n\t@{recipe}\n")
        done = subprocess.run(
            [tmp_path / ".ci" / "run"],
            env=CLEAN | {"KVLAB_CI_SECONDS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code and said in done.stderr
        assert ("stopped" in done.stderr) == bool(said)
    assert ":-5400}" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")  # decided: 90 minutes


def test_every_target_is_shown_by_help_and_is_no_file() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    rules = set(re.findall(r"^([a-z-]+):(?!=)", text, re.M))
    phony = re.search(r"^\.PHONY: (.*)$", text, re.M)
    assert phony and rules == set(targets()) == set(phony.group(1).split())
