"""What a notebook would be shown: the mime bundles, caught."""

from __future__ import annotations

import pytest

from kvlab.book import plots, predictions, session


@pytest.fixture
def shown(monkeypatch) -> list[dict]:
    """The bundles displayed during the test, in order."""
    bundles: list[dict] = []
    for module in (session, predictions, plots):
        monkeypatch.setattr(module, "_display", bundles.append)
    return bundles


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A cache folder of its own, and a session in which nothing was predicted."""
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "kvlab"))
    monkeypatch.delenv("KVLAB_BUILD", raising=False)
    monkeypatch.setattr(predictions, "_asked", {})
    return tmp_path / "kvlab"
