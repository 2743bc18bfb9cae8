"""The record of Measure: every shape of it is one that Measure runs, and the command writes what it prints."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from kvlab.book.results import REQUIRED
from kvlab.lab import measure_record as module
from kvlab.models.facts import ModelConfig
from kvlab.plan.explore import explorer_state
from kvlab.quant import get_codec
from kvlab.specs.resolve import resolve

TINY = {"model": "own", "layers": 1, "query_heads": 2, "kv_heads": 1, "head_dim": 16, "context": 64, "batch": 1}


@pytest.mark.parametrize("params", module.SHAPES, ids=str)
def test_every_shape_of_the_record_is_one_that_the_engine_runs(params) -> None:
    state = explorer_state(params)
    config = state["config"] or dict(resolve(state["params"]["model"]).config)
    text = config.get("text_config", config)
    assert ModelConfig.from_hf(config).num_layers == text["num_hidden_layers"]
    assert get_codec(state["params"]["kv_dtype"])


def test_the_command_prints_and_writes_seconds_cut_and_memory(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setenv("KVLAB_OPS", "torch")
    monkeypatch.setattr(module, "SHAPES", (TINY,))
    monkeypatch.setattr(module, "in_its_own_process", module.one)
    out = tmp_path / "measure.json"
    assert module.main(["--out", str(out)]) in (0, 1)
    written = json.loads(out.read_text())
    (shape,) = written["shapes"]
    assert set(REQUIRED) <= set(written) and shape["params"] == TINY
    assert shape["seconds"] > 0 and shape["peak_bytes"] > 2**26 and shape["half_of_free_bytes"] > 0
    said = capsys.readouterr().out
    assert f"{shape['seconds']:.1f} s" in said and shape["sentence"] in said and "1 shapes" in said
