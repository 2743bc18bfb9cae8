"""For all tests: helpers, Triton's interpreter, and other seeds for those that draw random schedules (`make fuzz`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# chosen before anything imports triton; ahead-of-time compilation is tested in processes of its own
os.environ["TRITON_INTERPRET"] = "1"

# tests import the helpers that several rooms share
sys.path.insert(0, str(Path(__file__).parent / "helpers"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--seed-offset N` adds N to the parameter `seed` of every test that has one."""
    parser.addoption("--seed-offset", type=int, default=0, help="add N to every test's parameter `seed`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `first` lead. With an offset only those that draw from a seed are left, each with another one."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
    offset = config.getoption("--seed-offset")
    if not offset:
        return
    seeded = [
        item for item in items if isinstance(getattr(item, "callspec", None) and item.callspec.params.get("seed"), int)
    ]
    for item in seeded:
        item.callspec.params["seed"] += offset
    config.hook.pytest_deselected(items=[item for item in items if item not in set(seeded)])
    items[:] = seeded
