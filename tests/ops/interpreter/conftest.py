"""Kernels of this folder run in Triton's interpreter; the device path is forced test by test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("KVLAB_OPS", "triton")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter computes with NumPy, which warns of NaN in lanes that a mask then leaves out."""
    for item in items:
        if "interpreter" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
