"""Parity of every shared config that the engine runs, two seeds each, with every mutation."""

import json
from pathlib import Path

import pytest

from kvlab.cli import parity as command
from kvlab.models.facts import ModelConfig

SHARED = Path(__file__).parents[3] / "shared" / "configs"


def runs(path: Path) -> bool:
    try:
        ModelConfig.from_hf(command._read(path))
    except ValueError:
        return False
    return True


def runnable() -> list[Path]:
    """The shared configs that the engine runs, multimodal wrappers by their text part."""
    return [p for p in sorted(SHARED.glob("*__*.json")) if runs(p)]


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared configs next to the project")
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("path", runnable(), ids=lambda p: p.stem)
def test_parity(path, seed):
    from kvlab.lab.parity import run_parity

    report = run_parity(json.loads(path.read_text()), seed=seed, mutations=True)
    assert report.passed, report.to_json()
