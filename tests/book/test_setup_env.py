"""`make lab PYTHON=...`: torch stays in the environment that has it, everything else lands in `.venv`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def environment(folder: Path, *packages: str) -> Path:
    """A virtual environment with stub packages, each of version 2.11.0+cu130; its interpreter."""
    real = Path(sys._base_executable).resolve()
    site = folder / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    site.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(real)
    (folder / "pyvenv.cfg").write_text(f"home = {real.parent}\ninclude-system-site-packages = false\n")
    for name in packages:
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("__version__ = '2.11.0+cu130'\n")
    return folder / "bin" / "python"


def imported(interpreter: Path, name: str) -> str:
    """Where `interpreter` finds a package; "" where it does not."""
    code = f"import importlib.util as u; s = u.find_spec({name!r}); print(s.origin if s else '')"
    return subprocess.run([str(interpreter), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """tools/setup_env.py on a checkout of its own with a `.venv`; pip's calls are kept, with what `.venv` saw at each."""
    spec = importlib.util.spec_from_file_location("setup_under_test", ROOT / "tools" / "setup_env.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "setup_under_test", module)
    spec.loader.exec_module(module)
    for name in module.PACKAGES:
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "STAMPS", tmp_path / ".venv" / ".kvlab")
    environment(module.VENV)
    module.calls = []

    def pip(*arguments, what):
        listed = [Path(arguments[i + 1]) for i, a in enumerate(arguments) if a == "-r"]
        names = {line.split("==")[0] for p in listed for line in (tmp_path / p).read_text().splitlines()}
        module.calls.append((arguments, names, imported(Path(module.python()), "torch")))

    monkeypatch.setattr(module, "pip", pip)
    return module


def run(module, monkeypatch, interpreter: Path, reuse: bool):
    """One set-up as `make lab` calls it, under `interpreter`; what pip was asked during it."""
    monkeypatch.setattr(sys, "executable", str(interpreter))
    module.calls.clear()
    module.install_packages(module.make_venv(reuse))
    return list(module.calls)


def test_pins_are_installed_before_the_other_environment_is_seen(setup, tmp_path, monkeypatch):
    """ruff, JupyterLab and their files would not be in `.venv` if pip found them over there."""
    base = environment(tmp_path / "base", "torch", "triton", "ruff")
    first, second, kvlab = run(setup, monkeypatch, base, reuse=True)
    assert first[2] == ""
    assert "--no-deps" in first[0] and {"ruff", "jupyterlab", "jupyterlab_widgets"} <= first[1]
    assert str(tmp_path / "base") in second[2] and "--no-deps" not in second[0]
    assert not {"torch", "triton"} & (first[1] | second[1])
    assert kvlab[0][-2:] == ("-e", ".")
    assert imported(Path(setup.python()), "torch").startswith(str(tmp_path / "base"))


@pytest.mark.parametrize("reuse", [True, False])
def test_a_later_call_keeps_that_torch_and_installs_nothing(setup, tmp_path, monkeypatch, reuse):
    """`make test` after `make lab PYTHON=...` must not fetch the pinned torch over it."""
    base = environment(tmp_path / "base", "torch", "triton")
    run(setup, monkeypatch, base, reuse=True)
    assert run(setup, monkeypatch, base if reuse else Path(setup.python()), reuse) == []
    (tmp_path / "constraints.txt").write_text("ruff==1\n")  # new pins: again in the same order, still without torch
    again = run(setup, monkeypatch, Path(setup.python()), reuse=False)
    assert [call[2] != "" for call in again[:2]] == [False, True]
    assert all("torch" not in call[1] for call in again)


def test_a_base_without_triton_gets_the_pinned_one(setup, tmp_path, monkeypatch):
    calls = run(setup, monkeypatch, environment(tmp_path / "base", "torch"), reuse=True)
    assert all("triton" in names and "torch" not in names for _, names, _ in calls[:2])


def test_a_base_without_torch_means_the_pinned_torch(setup, tmp_path, monkeypatch):
    first, _ = run(setup, monkeypatch, environment(tmp_path / "base"), reuse=True)
    assert {"torch", "triton"} <= {n.split(";")[0] for n in first[1]}


def test_what_cannot_work_ends_with_a_line_that_says_what_to_do(setup, tmp_path, monkeypatch):
    base = environment(tmp_path / "base", "torch", "triton")
    site = setup.base_path().parent
    (site / "torch").mkdir()
    with pytest.raises(SystemExit, match=r"torch of its own.*make distclean"):
        run(setup, monkeypatch, base, reuse=True)
    (site / "torch").rmdir()
    run(setup, monkeypatch, base, reuse=True)
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(SystemExit, match=r"is gone.*make distclean"):
        run(setup, monkeypatch, Path(setup.python()), reuse=False)
    old = next((tmp_path / "moved" / "lib").glob("python3.*/site-packages")) / "torch" / "__init__.py"
    old.write_text("__version__ = '2.10.1'\n")
    with pytest.raises(SystemExit, match=r"torch 2\.10\.1 .*older than 2\.11"):
        run(setup, monkeypatch, tmp_path / "moved" / "bin" / "python", reuse=True)
