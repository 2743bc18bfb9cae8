"""The chapter runner: runs once, runs again when anything it depends on changed, and sees silent failures."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """tools/run_chapters.py on a folder of its own."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    spec = importlib.util.spec_from_file_location("run_chapters_under_test", ROOT / "tools" / "run_chapters.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "CHAPTERS", tmp_path / "chapters")
    monkeypatch.setattr(module, "RUN", tmp_path / "run")
    monkeypatch.setattr(module, "REPORT", tmp_path / "reports" / "chapters.xml")
    for folder in ("chapters", "run", "kvlab", "book/results", "tools"):
        (tmp_path / folder).mkdir(parents=True)
    for name in (
        "requirements.txt",
        "constraints.txt",
        "tools/run_chapters.py",
        "tools/check_chapters.py",
        "kvlab/constants.py",
    ):
        (tmp_path / name).write_text("x")
    return module


def notebook(path: Path, *cells: str) -> Path:
    """A notebook of code cells."""
    code = [{"cell_type": "code", "id": f"c{i}", "metadata": {}, "execution_count": None, "outputs": [], "source": s}
            for i, s in enumerate(cells)]  # fmt: skip
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path.write_text(json.dumps({"cells": code, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))
    return path


def test_a_chapter_runs_once_until_something_it_imports_changes(runner, monkeypatch, tmp_path) -> None:
    ran = []
    monkeypatch.setattr(runner, "execute", lambda copy: ran.append(copy.name) or "")
    source = notebook(tmp_path / "chapters" / "01.ipynb", "1")
    runner.run_one(source, runner.shared_key(), False)
    runner.run_one(source, runner.shared_key(), False)
    assert ran == ["01.ipynb"]
    for changed in ("kvlab/constants.py", "requirements.txt", "book/results/new.json"):
        (tmp_path / changed).write_text("y")
        runner.run_one(source, runner.shared_key(), False)
        runner.run_one(source, runner.shared_key(), False)
    assert len(ran) == 4
    runner.run_one(source, runner.shared_key(), True)
    assert len(ran) == 5
    # the same pins with another torch behind them, as `make lab PYTHON=...` has it
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\n")
    for version in ("2.13.0", "2.14.0+cu130"):
        monkeypatch.setattr(runner, "installed", lambda name, v=version: v if name == "torch" else "1")
        runner.run_one(source, runner.shared_key(), False)
        assert runner.run_one(source, runner.shared_key(), False)["versions"]["torch"] == version
    assert len(ran) == 7


def test_a_failed_chapter_is_not_kept_as_done(runner, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(runner, "execute", lambda copy: "boom")
    source = notebook(tmp_path / "chapters" / "01.ipynb", "1")
    assert runner.run_one(source, runner.shared_key(), False)["result"] == "failed"
    monkeypatch.setattr(runner, "execute", lambda copy: "")
    assert runner.run_one(source, runner.shared_key(), False)["result"] == "passed"


SILENT = {
    "with_output": "import ipywidgets\nout = ipywidgets.Output()\nwith out:\n    [][1]\nout",
    "interact": "@ipywidgets.interact(n=(1, 3))\ndef shown(n):\n    return {}[n]",
    "capture": "box = ipywidgets.Output()\n@box.capture()\ndef told():\n    None.nothing\ntold()\nbox",
    "stderr": "import sys; print('lost', file=sys.stderr)",
    "thread": "import threading\nt = threading.Thread(target=lambda: int('x'))\nt.start(); t.join()",
}
SEEN = ("IndexError", "KeyError", "AttributeError", "cell 3: stderr: lost", "cell 4: stderr: Exception in thread")


def test_failures_that_let_every_cell_end_are_seen_in_a_real_run(runner, tmp_path, capsys) -> None:
    source = notebook(tmp_path / "chapters" / "01.ipynb", *SILENT.values(), "held = bytearray(300 << 20)")
    record = runner.run_one(source, runner.shared_key(), False)
    assert record["result"] == "failed" and 300 << 20 < record["peak_bytes"] < 1 << 30
    said = capsys.readouterr().out
    assert "1 passed" in said  # nbmake saw nothing
    assert [text for text in SEEN if f"FAILED: {text}" not in said and f": {text}: " not in said] == []


def test_a_plain_failure_ends_in_the_report_of_the_run(runner, tmp_path, capsys, monkeypatch) -> None:
    notebook(tmp_path / "chapters" / "01.ipynb", "1 / 0")
    monkeypatch.setattr(sys, "argv", ["run_chapters.py"])
    assert runner.main() == 1
    assert (
        "ZeroDivisionError" in (said := capsys.readouterr().out) and "0 passed, 1 failed; each chapter: median" in said
    )
    assert "ZeroDivisionError" in runner.REPORT.read_text()
    monkeypatch.setattr(sys, "argv", ["run_chapters.py", "nosuch"])
    assert runner.main() == 1 and "no chapter is named like nosuch" in capsys.readouterr().out


def test_a_hanging_chapter_is_stopped_with_its_kernel(runner, tmp_path, monkeypatch, capsys) -> None:
    pid_file = tmp_path / "pid"
    cell = f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(999)"
    source = notebook(tmp_path / "chapters" / "01.ipynb", cell)

    class Started(subprocess.Popen):
        """The limit counts from when the cell runs, so that it need not allow for the start of a kernel."""

        def communicate(self, *args, **options):
            end = time.monotonic() + 120
            while not pid_file.exists() and time.monotonic() < end:
                time.sleep(0.05)
            return super().communicate(*args, **options)

    monkeypatch.setattr(runner.subprocess, "Popen", Started)
    monkeypatch.setattr(runner, "NOTEBOOK_SECONDS", 0.5)
    assert runner.run_one(source, runner.shared_key(), False)["result"] == "failed"
    assert "stopped after 0.5 s" in capsys.readouterr().out
    kernel = int(pid_file.read_text())
    gone = not psutil.pid_exists(kernel) or psutil.Process(kernel).status() == psutil.STATUS_ZOMBIE
    assert gone


def test_a_widget_without_a_form_for_the_page_stops_the_build(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import build_book

    view = {"application/vnd.jupyter.widget-view+json": {}, "text/plain": "w"}
    outputs = [{"output_type": "display_data", "data": view, "metadata": {}}]
    made = {"cells": [{"cell_type": "code", "metadata": {}, "outputs": outputs}], "metadata": {"widgets": {}}}
    with pytest.raises(ValueError, match="cell 0: a widget without text/html"):
        build_book.for_the_page(made)
    view["text/html"] = "<table>"
    assert "application/vnd.jupyter.widget-view+json" not in str(build_book.for_the_page(made))


def ci_tool(monkeypatch):
    """tools/ci.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    spec = importlib.util.spec_from_file_location("ci_under_test", ROOT / "tools" / "ci.py")
    ci = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, ci)  # dataclasses look their module up
    spec.loader.exec_module(ci)
    return ci


def test_a_chapter_that_failed_or_never_ran_stops_the_build_with_its_name(
    runner, monkeypatch, tmp_path, capsys
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import build_book

    monkeypatch.setattr(build_book, "run_chapters", runner)
    monkeypatch.setattr(sys, "argv", ["build_book.py", "--keep-run"])
    for name, result in (("01", ""), ("02", "boom"), ("03", None)):
        source = notebook(tmp_path / "chapters" / f"{name}.ipynb", "1")
        if result is not None:
            monkeypatch.setattr(runner, "execute", lambda copy, r=result: r)
            runner.run_one(source, "", False)
    assert build_book.main() == 1
    said = capsys.readouterr().out
    assert (
        "book: 02.ipynb: failed\nbook: 03.ipynb: has not run\nbook: not built" in said and "01.ipynb: has" not in said
    )


def test_the_status_page_says_which_chapter_ran_under_other_versions(runner, monkeypatch, tmp_path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import status_page

    monkeypatch.setattr(status_page, "RUN", runner.RUN)
    monkeypatch.setattr(runner, "execute", lambda copy: "")
    for name, torch in (("01", "2.11"), ("02", "2.13"), ("03", "2.13")):
        monkeypatch.setattr(runner, "installed", lambda package, v=torch: v)
        record = runner.run_one(notebook(tmp_path / "chapters" / f"{name}.ipynb", "1"), "", False)
        (runner.RUN / f"{name}.json").write_text(json.dumps(record | {"date": f"2026-01-{name}"}))
    newest, *others = status_page.machine_lines().splitlines()
    assert "torch 2.13," in newest and [line for line in others if line] == [
        f"- 01 ran on: {newest.replace('2.13', '2.11')}"
    ]


def test_every_test_file_belongs_to_one_job(monkeypatch) -> None:
    ci = ci_tool(monkeypatch)
    files = {str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py")}
    taken: list[str] = []
    for job in ci.JOBS:
        for command in job.commands():
            if "pytest" in command:
                left = {a.split("=", 1)[1] for a in command if a.startswith("--ignore=")}
                named = [a.removeprefix(f"{ROOT}/") for a in command if a.removeprefix(f"{ROOT}/").startswith("tests")]
                inside = [f for f in files for name in named if f == name or f.startswith(f"{name}/")]
                book = "book and not slow" in command
                taken += [
                    f for f in inside if not any(f == p or f.startswith(f"{p}/") for p in left) and book == of_book(f)
                ]
    assert sorted(taken) == sorted(files)


def of_book(path: str) -> bool:
    """Whether the tests of a file carry the mark `book`."""
    return "pytest.mark.book" in (ROOT / path).read_text(encoding="utf-8").split("\ndef test_")[0]


def test_the_closing_count_has_every_job_and_chapter(runner, monkeypatch, tmp_path) -> None:
    ci = ci_tool(monkeypatch)
    monkeypatch.setattr(ci, "REPORTS", tmp_path / "reports")
    results = {"a": ("passed", 10.0, ""), "b": ("failed", 70.0, 'boom \x1b[31m tests="9"'), "c": ("passed", 20.0, "")}
    runner.write_report(
        [dict(zip(("result", "seconds", "problem"), r, strict=True), chapter=c) for c, r in results.items()]
    )
    suite = '<testsuite name="tests=5" errors="1" failures="1" skipped="2" tests="9"></testsuite>'
    (tmp_path / "reports" / "unit.xml").write_text(f"<testsuites>{suite}</testsuites>")
    (tmp_path / "reports" / "torn.xml").write_text("<testsuites>")
    assert ci.counts() == {"passed": 2 + 5, "failed": 1 + 2 + 1, "skipped": 2}
    assert ci.table([]).endswith("each chapter: median 20 s of 25, longest 70 s of 60 (b)")


def test_commands_of_a_job_run_at_the_same_time_and_each_failure_is_told(tmp_path, monkeypatch, capfd) -> None:
    ci = ci_tool(monkeypatch)
    # each waits for what the other one writes: one after the other would never end
    wait = "import pathlib, sys, time\nmine, other, code = sys.argv[1:]\npathlib.Path(mine).touch()\n"
    wait += "while not pathlib.Path(other).exists(): time.sleep(0.01)\nprint('seen', other)\nsys.exit(int(code))"
    names = [str(tmp_path / name) for name in "ab"]
    commands = [
        [sys.executable, "-c", wait, mine, other, code]
        for mine, other, code in zip(names, names[::-1], "30", strict=True)
    ]
    assert ci.run_commands(commands, dict(os.environ)) == [commands[0]]
    assert sorted(capfd.readouterr().out.splitlines()) == [f"seen {name}" for name in names]
