"""The GPU bench without a GPU: every kernel is checked in the interpreter, and nothing is measured or invented."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is for Linux only")
torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    pytest.skip("this is about machines without a GPU", allow_module_level=True)


def bench(out: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-W", "ignore", "-m", "kvlab.lab.bench_gpu", "--out", str(out), *arguments]
    return subprocess.run(call, capture_output=True, text=True, env=environment, check=False)


def test_the_check_covers_every_kernel_and_measurements_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "bench_gpu.json"
    done = bench(out)
    assert done.returncode == 2 and "stage copy: needs a GPU" in done.stderr, done.stderr
    result = json.loads(out.read_text())
    assert list(result["stages"]) == ["check"] and not result["stages"]["check"]["wrong"], result
    assert "interpreter" in result["cuda"] and {"what", "date", "commit", "device", "versions"} <= set(result)
    names = " ".join(result["stages"]["check"]["errors"])
    for kernel in (
        "int4",
        "mxfp4",
        "fp8_e4m3",
        "192/128",
        "closed groups kivi2",
        "absorbed",
        "ssd",
        "gated delta",
        "page scores",
        "copy",
    ):
        assert kernel in names
    assert set(result["seconds"]) == set(result["measured"]) == {"check"}
    assert result["measured"]["check"]["commit"] == result["commit"]
    # a second run goes on where the first stopped, and has nothing more that it can do
    again = bench(out, "--stage", "decode")
    assert again.returncode == 2 and json.loads(out.read_text())["stages"].keys() == {"check"}


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvlab.lab import bench_gpu_check

    def fails() -> tuple[float, float]:
        raise ValueError("no such instruction")

    cases = {
        "right": lambda: (1e-6, 1e-4),
        "wrong": lambda: (0.1, 1e-4),
        "nan": lambda: (float("nan"), 1.0),
        "gone": fails,
    }
    monkeypatch.setattr(bench_gpu_check, "cases", lambda device: cases)
    found = bench_gpu_check.check(torch.device("cpu"))
    assert found["wrong"] == ["wrong", "nan", "gone"]
    assert found["errors"]["gone"] == "ValueError: no such instruction"
