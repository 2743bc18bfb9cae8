"""Everything that CI runs, job by job, with a table of budgets and measured times at the end. Standard library only.

`make test` runs all of it; `--only NAME` one job. A failing job does not stop the ones after it, set-up apart, so that one
run shows everything that is wrong. The last line counts the tests of all jobs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from run_chapters import times_line

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv" / "bin"
PY = str(VENV / "python")
REPORTS = ROOT / "build" / "reports"
PARITY = (
    *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests" / "lab").glob("test_parity*.py"))),
    "tests/engine/test_every_kind.py",
    "tests/models/test_real_model.py",
    "tests/models/test_decoder.py::test_fp32_stays_within_rounding_of_fp64",
    "tests/lab/test_measure.py",  # what the plan predicts against what the engine has; it compiles, and this job has room
)
# what compiles or interprets kernels is together in one job, so that each is compiled once
KERNELS = (
    "tests/ops",
    "tests/quant",
    "tests/engine/test_lossy_under_pressure.py",
    "tests/speculate/test_speculation_pitfalls.py::test_a_lossy_format_gives_the_same_tokens_with_drafts",
    *(
        f"tests/lab/test_{n}.py"
        for n in ("bench_gpu", "bench_gpu_cases", "bench_gpu_rows", "kernel_access", "kernel_puzzles", "quality")
    ),
)
# the runner of chapters, which starts kernels of its own: beside other tests it would time out, not fail
RUNNER = ("tests/book/test_pipeline.py",)


@dataclass(frozen=True)
class Job:
    """One row of the table: commands that must all succeed, one after another, or `together` after the first."""

    name: str
    budget_minutes: float
    commands: Callable[[], list[list[str]]]
    together: bool = False


def pytest(name: str, *arguments: str, workers: int = 2) -> list[str]:
    """A pytest call without the slow tests, with its report kept for the closing count."""
    report = f"--junit-xml={REPORTS / name}.xml"
    which = "book and not slow" if name.startswith("browser") else "not book and not slow"
    call = [PY, "-m", "pytest", "-m", which, "--durations=5", "--durations-min=5", report, *arguments]
    return [*call, "-n", str(workers)] if workers > 1 else call


def setup_job() -> list[list[str]]:
    """Environment with the default model."""
    reuse = ["--reuse-torch"] if "--reuse-torch" in sys.argv else []
    return [[sys.executable, "tools/setup_env.py", *reuse, "--model", "--kernel"], [PY, "tools/assets.py"]]


def lint_job() -> list[list[str]]:
    """Rules and format."""
    ruff = str(VENV / "ruff")
    return [[ruff, "check", "kvlab", "tests", "tools"], [ruff, "format", "--check", "kvlab", "tests", "tools"]]


def unit_job() -> list[list[str]]:
    """All tests but those that the other jobs run."""
    ignored = [f"--{'deselect' if '::' in path else 'ignore'}={path}" for path in (*PARITY, *KERNELS, *RUNNER)]
    return [pytest("unit", "tests", *ignored)]


def chapters_job() -> list[list[str]]:
    """Every chapter executed, and the tests of what executes them."""
    return [[PY, "tools/run_chapters.py"], pytest("runner", *RUNNER, workers=1)]


def browser_job() -> list[list[str]]:
    """The built pages, and beside them JupyterLab and the live widgets: two browsers, each with a server of its own."""
    driven, widgets = "tests/book/pages/test_jupyterlab.py", sorted((ROOT / "tests" / "book").glob("test_*_page.py"))
    # JupyterLab last: its browser is the session's, and Playwright runs one at a time in a process
    live = pytest("browser-live", *map(str, widgets), driven, workers=1)
    return [[PY, "tools/browser.py"], live, pytest("browser", "tests/book/pages", f"--ignore={driven}", workers=1)]


JOBS = (
    Job("setup", 4, setup_job),
    Job("lint", 1, lint_job),
    Job("unit", 7, unit_job),
    Job("parity", 4, lambda: [pytest("parity", *PARITY)]),
    Job("kernels", 6, lambda: [pytest("kernels", *KERNELS)]),
    Job("chapters", 12, chapters_job),
    Job("build", 0.5, lambda: [[PY, "tools/build_book.py", "--keep-run"]]),
    Job("browser", 4.5, browser_job, together=True),
)


def environment() -> dict[str, str]:
    """What the jobs run under: two pytest workers share two cores, so each computes with one thread."""
    kept = os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "JUPYTER_PLATFORM_DIRS": "1"}
    return kept | {"TOKENIZERS_PARALLELISM": "false"}


def run_job(job: Job) -> tuple[bool, float]:
    """Runs one job; whether it passed, and its seconds."""
    start = time.monotonic()
    print(f"\n===== {job.name}", flush=True)
    passed = True
    threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "2"} if job.name in ("unit", "parity", "kernels") else {}
    first, *rest = job.commands()
    for commands in [[first], rest] if job.together else [[command] for command in (first, *rest)]:
        failed = run_commands(commands, environment() | threads)
        for command in failed:
            print(f"ci: {job.name}: failed: {' '.join(command)}", flush=True)
        if failed:
            passed = False
            break
    return passed, time.monotonic() - start


def run_commands(commands: list[list[str]], env: dict[str, str]) -> list[list[str]]:
    """Runs the commands at the same time, all but the last with their output kept until they end; those that failed."""
    *before, last = commands
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(tempfile.TemporaryFile()) for _ in before]
        started = [
            subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT)
            for command, file in zip(before, kept, strict=True)
        ]
        failed = [last] if subprocess.run(last, cwd=ROOT, env=env, check=False).returncode else []
        for command, process, file in zip(before, started, kept, strict=True):
            if process.wait():
                failed.append(command)
            file.seek(0)
            print(file.read().decode(errors="replace"), end="", flush=True)
    return failed


def reports() -> Iterator[tuple[str, ElementTree.Element]]:
    """Name and root of every report of this run; one that cannot be read counts as a failed test."""
    for path in sorted(REPORTS.glob("*.xml")):
        try:
            yield path.stem, ElementTree.parse(path).getroot()
        except ElementTree.ParseError:
            yield path.stem, ElementTree.Element("testsuite", tests="1", failures="1")


def counts() -> dict[str, int]:
    """Tests passed, failed and skipped over all reports of this run; each chapter counts as one test."""
    total = {"passed": 0, "failed": 0, "skipped": 0}
    for suite in (suite for _, root in reports() for suite in root.iter("testsuite")):
        tests, errors, failures, skipped = (int(suite.get(n, 0)) for n in ("tests", "errors", "failures", "skipped"))
        total["failed"] += errors + failures
        total["skipped"] += skipped
        total["passed"] += tests - errors - failures - skipped
    return total


def chapter_times() -> str:
    """Median and longest time of the chapters of this run beside their budgets; "" where none ran."""
    cases = [case for name, root in reports() if name == "chapters" for case in root.iter("testcase")]
    return times_line({case.get("name", ""): float(case.get("time", 0)) for case in cases}) if cases else ""


def table(results: list[tuple[Job, bool, float]]) -> str:
    """The closing table: job, budget, what it took, result."""
    lines = [f"{'job':10} {'budget':>9} {'measured':>9}  result"]
    for job, passed, seconds in results:
        late = " (over budget)" if seconds > 60 * job.budget_minutes else ""
        lines.append(
            f"{job.name:10} {60 * job.budget_minutes:7.0f} s {seconds:7.0f} s  {'passed' if passed else 'FAILED'}{late}"
        )
    total = sum(seconds for _, _, seconds in results)
    lines.append(f"{'all':10} {60 * sum(j.budget_minutes for j, _, _ in results):7.0f} s {total:7.0f} s")
    return "\n".join([*lines, chapter_times()]).rstrip()


def main() -> int:
    """Runs the jobs; 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=[job.name for job in JOBS], help="only this job")
    parser.add_argument("--reuse-torch", action="store_true", help="take torch from the interpreter running this")
    options = parser.parse_args()
    REPORTS.mkdir(parents=True, exist_ok=True)
    for old in REPORTS.glob("*.xml"):
        old.unlink()
    results = []
    for job in JOBS:
        if options.only and job.name not in options.only:
            continue
        passed, seconds = run_job(job)
        results.append((job, passed, seconds))
        if job.name == "setup" and not passed:
            break
    found = counts()
    print(
        f"\n{table(results)}\n\n{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped",
        flush=True,
    )
    return 0 if all(passed for _, passed, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
