"""The figures of the recall experiment draw what is recorded, and say it in words."""

from __future__ import annotations

import pytest

pytest.importorskip("plotly", reason="plotly is not installed")

from kvlab.book.mqar_plot import FAMILIES, bytes_figure, load_figure, show_bytes, show_loads

PROVENANCE = {"device": "a machine", "versions": {"torch": "1"}, "commit": "0" * 40, "date": "2026-01-02"}


def cell(kv_bytes: int, mean: float) -> dict:
    return {"kv_bytes": kv_bytes, "mean": mean, "band95": [mean - 0.02, mean + 0.01], "accuracy": [mean]}


RESULT = {
    "models": {
        "mha": {"label": "MHA", "loads": {"4": cell(50_000, 1.0), "32": cell(400_000, 0.98)}},
        "mamba2": {"label": "Mamba-2", "loads": {"4": cell(17_000, 0.9), "32": cell(17_000, 0.4)}},
    },
    "conditions": "Tiny models.",
    **PROVENANCE,
}


def test_a_point_per_model_with_its_band() -> None:
    fig = bytes_figure(RESULT, 32)
    drawn = {t.name: (t.x, t.y, t.error_y.array, t.error_y.arrayminus) for t in fig.data if t.x}
    assert drawn["attention"] == ((400_000,), (0.98,), pytest.approx((0.01,)), pytest.approx((0.02,)))
    assert drawn["state"][:2] == ((17_000,), (0.4,))
    assert {note.text for note in fig.layout.annotations} == {"MHA", "Mamba-2"}


def test_a_line_per_model_over_the_loads() -> None:
    fig = load_figure(RESULT, ("mamba2", "mha"))
    assert [(t.name, t.x, t.y) for t in fig.data] == [("Mamba-2", (4, 32), (0.9, 0.4)), ("MHA", (4, 32), (1.0, 0.98))]


def test_the_text_says_bytes_and_accuracy_of_every_model(monkeypatch) -> None:
    said: list[dict] = []
    monkeypatch.setattr("kvlab.book.mqar_plot.show", lambda figure, **words: said.append(words))
    show_bytes(RESULT, 32)
    show_loads(RESULT, ["mamba2"])
    assert "Mamba-2 17,000 bytes, 40%; MHA 400,000 bytes, 98%" in said[0]["alt"]
    assert "Mamba-2 90% at 4, 40% at 32" in said[1]["alt"]
    assert all("Tiny models." in words["caption"] and "a machine" in words["caption"] for words in said)


def test_a_load_that_is_not_recorded_is_refused() -> None:
    with pytest.raises(ValueError, match="pairs 5: must be one of 4, 32"):
        bytes_figure(RESULT, 5)


def test_every_kind_of_the_experiment_belongs_to_a_family() -> None:
    models = pytest.importorskip("kvlab.lab.mqar.models", reason="torch is not installed")
    assert sorted(name for names in FAMILIES.values() for name in names) == sorted(models.KINDS)
