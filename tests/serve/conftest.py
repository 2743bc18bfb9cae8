"""A tiny model that speaks: random weights in fp64, a word-level tokenizer of 61 words, a chat template."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def plain_operations(monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "reference")
