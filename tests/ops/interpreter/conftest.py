"""Kernels of this folder run in Triton's interpreter, which has to be chosen before triton is first imported.

Nothing else in tests/ops imports triton, and ahead-of-time compilation is tested in processes of its own, so the choice
stays in this process. The device path is forced test by test.
"""

from __future__ import annotations

import os
import sys

import pytest

assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", "triton was imported to compile"
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("KVLAB_OPS", "triton")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter computes with NumPy, which warns of NaN in lanes that a mask then leaves out."""
    for item in items:
        if "interpreter" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
