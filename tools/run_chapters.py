"""Executes every chapter once, in a fresh kernel, with nbmake; the book is built from these executed copies.

A copy lies in build/run/ and is kept while the chapter and everything that it could import or read is unchanged: kvlab,
recorded results, pinned and installed packages, Python (an execution cache that looks at the notebook alone shows stale
numbers).
After a run the copy is scanned for failures that nbmake lets pass: errors inside widget outputs, text on stderr, and a
result that the chapter tells before it asks for it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from check_chapters import told_before

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = ROOT / "chapters"
RUN = ROOT / "build" / "run"
REPORT = ROOT / "build" / "reports" / "chapters.xml"
CELL_SECONDS = 280
NOTEBOOK_SECONDS = 300  # hard stop; the budget is 60, and a busy or slower machine may take a few times that
INPUTS = (
    "kvlab",
    "book/results",
    "requirements.txt",
    "constraints.txt",
    "tools/run_chapters.py",
    "tools/check_chapters.py",
)
SHOWN = ("kvlab", "torch", "transformers", "numpy", "numba", "jupyter-book", "jupyterlab", "plotly", "anywidget")
# pytest, and afterwards the most memory that one process below it held: the chapter's kernel. Without the grammar of
# internationalized addresses, which jsonschema would compile for a second or two and no notebook needs.
PYTEST = """import pathlib, resource, sys
sys.modules["rfc3987_syntax"] = None
import pytest
code = pytest.main(sys.argv[2:])
pathlib.Path(sys.argv[1]).write_text(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(code)"""
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"


def chapters() -> list[Path]:
    """The chapters' notebooks, in reading order."""
    return sorted(p for p in CHAPTERS.glob("*.ipynb") if not p.name.startswith("."))


def installed(name: str) -> str:
    """The version of a package that is installed here."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def pinned_names() -> list[str]:
    """The packages that the requirements and constraints name; one taken from elsewhere may have another version."""
    text = "".join((ROOT / name).read_text(encoding="utf-8") + "\n" for name in ("requirements.txt", "constraints.txt"))
    return sorted(set(re.findall(r"^([A-Za-z0-9][\w.-]*)", text, re.M)))


def shared_key() -> str:
    """Digest of what every chapter depends on besides its own text: code, results, and what is installed."""
    versions = [f"{name} {installed(name)}" for name in pinned_names()]
    found = hashlib.sha256("\n".join([platform.python_version(), platform.machine(), *versions]).encode())
    for name in INPUTS:
        path = ROOT / name
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and file.suffix != ".pyc":
                found.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def chapter_key(notebook: Path, shared: str) -> str:
    """Digest of one chapter and of `shared`."""
    return hashlib.sha256(notebook.read_bytes() + shared.encode()).hexdigest()


def failures_nbmake_passes(notebook: dict) -> list[str]:
    """What is wrong in an executed notebook although every cell ended: one line each."""
    found = []
    for number, cell in enumerate(notebook["cells"]):
        for output in cell.get("outputs", ()):
            if output["output_type"] == "error":
                found.append(f"cell {number}: {output.get('ename')}: {output.get('evalue')}")
            if output["output_type"] == "stream" and output.get("name") == "stderr":
                found.append(f"cell {number}: stderr: {''.join(output['text']).strip()[:200]}")
    states = notebook.get("metadata", {}).get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    for name, widget in states.items():
        for output in widget.get("state", {}).get("outputs", ()):
            if output.get("output_type") == "error":
                found.append(f"widget {name}: {output.get('ename')}: {output.get('evalue')}")
            if output.get("name") == "stderr":
                found.append(f"widget {name}: stderr: {''.join(output.get('text', ''))[:200]}")
    return found


def end_all(pid: int) -> None:
    """Ends a process and everything below it: a kernel has a session of its own and would outlive its group."""
    import psutil

    family = psutil.Process(pid).children(recursive=True)
    for process in [psutil.Process(pid), *family]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def execute(copy: Path) -> str:
    """Runs `copy` in place; returns "" or what went wrong. At the limit it ends with its kernel."""
    nbmake = ["--disable-plugin-autoload", "-p", "nbmake.pytest_plugin"]  # the others cost seconds for each chapter
    nbmake += ["--nbmake", "--overwrite", f"--nbmake-timeout={CELL_SECONDS}"]
    quiet = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(copy.parent), "--color=no"]
    command = [sys.executable, "-c", PYTEST, str(copy.with_suffix(".peak")), *nbmake, *quiet, copy.name]
    environment = os.environ | {
        "KVLAB_BUILD": "1", "JUPYTER_PREFER_ENV_PATH": "1", "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "default"),
        "JUPYTER_PLATFORM_DIRS": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
    }  # fmt: skip
    with subprocess.Popen(
        command, cwd=copy.parent, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            text, _ = process.communicate(timeout=NOTEBOOK_SECONDS)
        except subprocess.TimeoutExpired:
            end_all(process.pid)
            return f"stopped after {NOTEBOOK_SECONDS} s, the limit for one chapter"
        except BaseException:  # Ctrl-C, or the end of CI's time
            end_all(process.pid)
            raise
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).strip()
    print(text.splitlines()[-1] if text else "", flush=True)
    return "\n".join(text.splitlines()[-60:]) if process.returncode else ""


def peak_bytes(copy: Path) -> int | None:
    """The most memory that the kernel of the last run of `copy` held; None where it ended too early to tell."""
    found = copy.with_suffix(".peak")
    if not found.exists():
        return None
    unit = 1 if platform.system() == "Darwin" else 1024  # what ru_maxrss counts in
    return unit * int(found.read_text())


def machine() -> dict[str, str]:
    """What the chapters run on, for the status page."""
    names = (
        re.findall(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
        if os.path.exists("/proc/cpuinfo")
        else []
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()), "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(), "commit": commit.stdout.strip() or "unknown",
    }  # fmt: skip


def run_one(source: Path, shared: str, force: bool) -> dict:
    """Record of the run of one chapter: from the cache, or made now."""
    copy, record_path = RUN / source.name, RUN / f"{source.stem}.json"
    key = chapter_key(source, shared)
    if not force and copy.exists() and record_path.exists():
        record = json.loads(record_path.read_text())
        if record["key"] == key and record["result"] == "passed":
            print(f"{source.name}: unchanged since {record['date']}", flush=True)
            return record | {"cached": True}
    shutil.copyfile(source, copy)
    copy.with_suffix(".peak").unlink(missing_ok=True)
    print(f"{source.name}: ", end="", flush=True)
    start = time.monotonic()
    problem = execute(copy)
    seconds = round(time.monotonic() - start, 1)
    silent = []
    if not problem:
        executed = json.loads(copy.read_text(encoding="utf-8"))
        silent = [*failures_nbmake_passes(executed), *told_before(executed["cells"])]
    for line in [problem] * bool(problem) + silent:
        print(f"{source.name}: FAILED: {line}", flush=True)
    record = {
        "chapter": source.stem, "key": key, "result": "failed" if problem or silent else "passed", "seconds": seconds,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"), "machine": machine(),
        "versions": {name: installed(name) for name in SHOWN}, "peak_bytes": peak_bytes(copy),
        "problem": "\n".join([problem] * bool(problem) + silent),
    }  # fmt: skip
    record_path.write_text(json.dumps(record, indent=1))
    return record


def times_line(seconds: dict[str, float]) -> str:
    """How long chapters take beside what is decided: a median of 25 s, and 60 s for the longest."""
    longest = max(seconds, key=seconds.__getitem__)
    median = statistics.median(seconds.values())
    return f"each chapter: median {median:.0f} s of 25, longest {seconds[longest]:.0f} s of 60 ({longest})"


def write_report(records: list[dict]) -> None:
    """build/reports/chapters.xml: each chapter as one test, for the closing count and table of tools/ci.py."""
    failed = sum(r["result"] != "passed" for r in records)
    suite = ElementTree.Element("testsuite", name="chapters", tests=str(len(records)), failures=str(failed))
    for record in records:
        case = ElementTree.SubElement(suite, "testcase", name=record["chapter"], time=str(record["seconds"]))
        if record["result"] != "passed":
            ElementTree.SubElement(case, "failure", message=re.sub(r"[^\n -~]", "?", record["problem"])[-2000:])
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(suite).write(REPORT, encoding="utf-8")


def main() -> int:
    """Executes the chapters named, or all; 1 when one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="part of a chapter's file name; default: every chapter")
    parser.add_argument("--force", action="store_true", help="execute again what is unchanged")
    options = parser.parse_args()
    # ended from outside, a chapter and its kernel end too: they are in sessions of their own
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("chapters: told to end"))
    RUN.mkdir(parents=True, exist_ok=True)
    wanted = [p for p in chapters() if not options.names or any(n in p.name for n in options.names)]
    for stale in RUN.glob("*.ipynb"):
        if not (CHAPTERS / stale.name).exists():
            stale.unlink()
            for kept in (".json", ".peak"):
                stale.with_suffix(kept).unlink(missing_ok=True)
    shared = shared_key()
    records = [run_one(path, shared, options.force) for path in wanted]
    if not records:
        print(f"no chapter is named like {', '.join(options.names)}" if options.names else "there is no chapter")
        return 1
    write_report(records)
    passed = sum(r["result"] == "passed" for r in records)
    print(
        f"{passed} passed, {len(records) - passed} failed; {times_line({r['chapter']: r['seconds'] for r in records})}"
    )
    return 0 if passed == len(records) else 1


if __name__ == "__main__":
    sys.exit(main())
