"""Runs what is too long for CI and writes a dated result with its commit to book/results; the status page shows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from kvlab.lab.record import provenance

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "book" / "results"
FUZZ_SECONDS = 600
SOAK_SECONDS = 1800
SLOW = "the slow tests: long prompts, shared configurations with two seeds, a fixed sample of the full kernel product"
FUZZ = "every test that draws from a seed, with new seeds for {:g} s"


def pytest(name: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code of one pytest run, counts (tests, errors, failures, skipped), and how often it skipped for what reason."""
    report = ROOT / "build" / "reports" / f"recorded-{name}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-n", "2", f"--junit-xml={report}", *arguments]
    code = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode
    return code, summary(report.read_text(encoding="utf-8")) if report.exists() else {}


def summary(report: str) -> dict[str, Any]:
    """Counts of a JUnit report, and with skips their reasons."""
    suite = next(ElementTree.fromstring(report).iter("testsuite"))
    counts: dict[str, Any] = {name: int(suite.get(name, 0)) for name in ("errors", "failures", "skipped", "tests")}
    # an expected failure is a skip to JUnit
    reasons = Counter(f"{skip.get('type', '')}: {skip.get('message', '')}" for skip in suite.iter("skipped"))
    return counts | ({"skip_reasons": dict(sorted(reasons.items()))} if reasons else {})


def slow() -> tuple[int, dict]:
    """Runs the slow tests."""
    code, counts = pytest("slow", "-m", "slow", "tests")
    return code, {"what": SLOW, "tests": counts}


def fuzz() -> tuple[int, dict]:
    """Runs the seeded tests again and again with new seeds; stops at the first round that fails and names its offset."""
    seconds = float(os.environ.get("FUZZ_SECONDS", FUZZ_SECONDS))
    start, offset, total, code = time.monotonic(), 0, 0, 0
    while not code and time.monotonic() - start < seconds:
        offset += 1000
        code, counts = pytest("fuzz", f"--seed-offset={offset}", "-m", "not book and not slow", "tests")
        total += counts.get("tests", 0)
    return code, {
        "what": FUZZ.format(seconds),
        "tests": {"tests": total, "failures": int(bool(code))},
        "last_offset": offset,
    }


def soak() -> tuple[int, dict]:
    """Runs the soak on the default model, for SOAK_SECONDS seconds (the environment may say otherwise)."""
    from kvlab.lab.soak import SoakOptions
    from kvlab.lab.soak import soak as run_soak
    from kvlab.models.load import load_model

    seconds = float(os.environ.get("SOAK_SECONDS", SOAK_SECONDS))
    found = run_soak(
        load_model(None, "fp32", "cpu"), SoakOptions(seconds, rate=float(os.environ.get("SOAK_RATE", 1.0)))
    )
    code = int(bool(found["problems"]))
    tests = {"tests": found["requests"], "failures": len(found["problems"])}
    return code, {"what": f"open-loop load on the server for {seconds:g} s", "tests": tests, "soak": found}


def quality() -> int:
    """Every format on 30,720 tokens in chunks, three of them token by token, and passkeys on both models; each command
    writes its own record."""
    every = ["--formats", "ALL"]
    for module, out, arguments in (
        ("quality", "quality_kv_formats", ["--in-chunks", *every]),
        ("quality", "quality_one_by_one", []),
        ("passkey", "passkey_kv_formats", every),
        ("passkey", "passkey_kv_formats_gemma", [*every, "--model", "gemma3-270m"]),
    ):
        command = [sys.executable, "-m", f"kvlab.lab.{module}", "--out", str(RESULTS / f"{out}.json"), *arguments]
        if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
            return code
    return 0


def record(name: str, command: Callable[[], tuple[int, dict]]) -> int:
    """Runs `command` and keeps what it found, with its provenance."""
    start = time.monotonic()
    code, found = command()
    result = {**found, **provenance(f"make {name}"), "exit_code": code, "seconds": round(time.monotonic() - start, 1)}
    if found["tests"].get("tests"):
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return code


def main() -> int:
    """`recorded.py slow|fuzz|soak|quality`."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    RESULTS.mkdir(parents=True, exist_ok=True)
    if name == "quality":
        return quality()
    runs = {"slow": slow, "fuzz": fuzz, "soak": soak}
    if name not in runs:
        print(f"recorded: {name!r}: must be quality, slow, fuzz or soak", file=sys.stderr)
        return 2
    return record(name, runs[name])


if __name__ == "__main__":
    sys.exit(main())
