"""Which implementation runs, and what the environment variable may say."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kvlab.ops import dispatch, numba_support


def test_the_choice_follows_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLAB_OPS", raising=False)
    expected = "cpu" if numba_support.available() else "reference"
    assert dispatch.backend(torch.ones(1)) == expected
    assert dispatch.backend(torch.ones(1, dtype=torch.float64)) == "reference"
    assert dispatch.backend(torch.ones(1, device="meta")) == "torch"


def test_without_numba_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLAB_OPS", raising=False)
    monkeypatch.setattr(numba_support, "available", lambda: False)
    assert dispatch.backend(torch.ones(1)) == "reference"
    monkeypatch.setenv("KVLAB_OPS", "cpu")
    with pytest.raises(ValueError, match="needs Numba"):
        dispatch.backend(torch.ones(1))


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_OPS", "cuda")
    with pytest.raises(ValueError, match="KVLAB_OPS 'cuda': must be one of reference, torch, cpu, triton"):
        dispatch.backend(torch.ones(1))


def test_triton_runs_where_an_operation_has_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnDevice:
        device, dtype = torch.device("cuda"), torch.bfloat16

    monkeypatch.delenv("KVLAB_OPS", raising=False)
    assert dispatch.backend(OnDevice(), triton=True) == ("triton" if dispatch.has_triton() else "torch")
    assert dispatch.backend(OnDevice()) == "torch"
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    assert dispatch.backend(OnDevice(), triton=True) == "torch"


def test_triton_on_the_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_OPS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="KVLAB_OPS 'triton': on the CPU needs TRITON_INTERPRET=1"):
        dispatch.backend(torch.ones(1), triton=True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.backend(torch.ones(1), triton=True) == "triton"
    assert dispatch.backend(torch.ones(1)) == "torch"
    assert dispatch.backend(torch.ones(1, dtype=torch.float64), triton=True) == "reference"


@pytest.mark.skipif(not numba_support.available(), reason="Numba is not installed")
def test_starting_the_kernels_leaves_torch_its_threads() -> None:
    """In a fresh process: Numba's pool starts once, and with OpenMP it shares a setting with torch."""
    program = (
        "import torch; torch.set_num_threads(1)\n"
        "from kvlab.ops.linear import linear\n"
        "linear(torch.ones(1, 8), torch.ones(8, 8))\n"
        "assert torch.get_num_threads() == 1, torch.get_num_threads()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "KVLAB_OPS": "cpu"})
