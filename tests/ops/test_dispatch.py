"""Which implementation runs, and what the environment variable may say."""

from __future__ import annotations

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
    with pytest.raises(ValueError, match="KVLAB_OPS 'cuda': must be one of reference, torch, cpu"):
        dispatch.backend(torch.ones(1))
