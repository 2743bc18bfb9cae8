"""The chapter runner: runs once, runs again when anything it depends on changed, and sees silent failures."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
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


def test_a_failed_chapter_is_not_kept_as_done(runner, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(runner, "execute", lambda copy: "boom")
    source = notebook(tmp_path / "chapters" / "01.ipynb", "1")
    assert runner.run_one(source, runner.shared_key(), False)["result"] == "failed"
    monkeypatch.setattr(runner, "execute", lambda copy: "")
    assert runner.run_one(source, runner.shared_key(), False)["result"] == "passed"


SILENT = """import ipywidgets
out = ipywidgets.Output()
with out:
    1 / 0
out"""


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (SILENT, "ZeroDivisionError"),
        ("import sys; print('lost', file=sys.stderr)", "stderr: lost"),
        ("1 / 0", "ZeroDivisionError"),
    ],
    ids=["in a widget's output", "stderr", "plain"],
)
def test_failures_are_seen_in_a_real_run(runner, tmp_path, capsys, cell, said) -> None:
    source = notebook(tmp_path / "chapters" / "01.ipynb", cell)
    assert runner.run_one(source, runner.shared_key(), False)["result"] == "failed"
    assert said in capsys.readouterr().out


def test_a_hanging_chapter_is_stopped_with_its_kernel(runner, tmp_path, monkeypatch, capsys) -> None:
    pid_file = tmp_path / "pid"
    cell = f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(999)"
    source = notebook(tmp_path / "chapters" / "01.ipynb", cell)
    for limit in (10, 40, 120):  # long enough, on a busy machine too, for the kernel to have started
        monkeypatch.setattr(runner, "NOTEBOOK_SECONDS", limit)
        assert runner.run_one(source, runner.shared_key(), False)["result"] == "failed"
        assert f"stopped after {limit} s" in capsys.readouterr().out
        if pid_file.exists():
            break
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


def test_commands_of_a_job_run_at_the_same_time_and_each_failure_is_told(tmp_path, monkeypatch, capfd) -> None:
    spec = importlib.util.spec_from_file_location("ci_under_test", ROOT / "tools" / "ci.py")
    ci = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, ci)  # dataclasses look their module up
    spec.loader.exec_module(ci)
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
