"""How chapters meet an architecture: what is shown was measured, and a run that disagrees does not pass."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from kvlab.book import meet as met


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    """Operations in torch: bytes and the wording are the same, and the parity job computes with the kernels."""
    monkeypatch.setenv("KVLAB_OPS", "torch")


def test_a_config_is_that_of_the_text_decoder_with_fields_replaced() -> None:
    config = met.config_of("gemma-3-27b", sliding_window=5)
    assert config["model_type"] == "gemma3_text" and config["sliding_window"] == 5
    assert met.spec_of("gemma-3-27b", sliding_window=5).layers[0].parts[0].window == 5


def test_runs_are_shown_with_predicted_and_measured_bytes(capsys) -> None:
    runs = met.meet("mistral-7b-v0.1", lengths=(5, 7, 23))
    assert [r.tokens for r in runs] == [5, 7, 23] and runs[1].held == runs[2].held > runs[0].held
    assert all((r.predicted, r.planned) == (r.held, r.allocated) for r in runs)
    assert f"{runs[0].held}" in capsys.readouterr().out


def test_a_run_that_is_not_as_predicted_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(met, "run_once", lambda model, tokens: met.Run(tokens, 10, 11, 20, 20))
    with pytest.raises(ValueError, match="predicted 10, 20"):
        met.meet("mistral-7b-v0.1", lengths=(5,))


def test_parity_says_how_it_was_tried_and_how_close_it_came(capsys) -> None:
    assert 0 < met.parity("qwen3-0.6b") < 1e-4
    said = capsys.readouterr().out
    assert "chunked prefill" in said and "qwen3-0.6b" in said


def test_a_family_that_the_engine_does_not_run_is_named() -> None:
    with pytest.raises(ValueError, match="qwen"):
        met.parity("qwen-7b")
