"""The explorer in a kernel: its messages, its mime bundle, and Measure in a thread that can be cancelled."""

from __future__ import annotations

import json
import threading

import pytest

pytest.importorskip("anywidget", reason="anywidget is not installed")

from kvlab.plan.explore import DEFAULTS, explorer_state
from kvlab.widgets import Explorer
from kvlab.widgets import explorer as module

VIEW = "application/vnd.jupyter.widget-view+json"


class Recorded(Explorer):
    """An explorer whose messages to the front end are kept."""

    def __init__(self, **params: object) -> None:
        self.sent: list[dict] = []
        self.done = threading.Event()
        super().__init__(**params)

    def send(self, content: dict, buffers: object = None) -> None:
        self.sent.append(content)
        if content.get("kind") == "measured":
            self.done.set()

    def hear(self, **message: object) -> None:
        self._on_message(self, message, [])


def test_it_starts_with_the_state_of_its_settings() -> None:
    widget = Explorer(model="llama-3.1-70b", tp=4)
    assert widget.params == {**DEFAULTS, "model": "llama-3.1-70b", "tp": 4}
    assert widget.state == explorer_state({"model": "llama-3.1-70b", "tp": 4})
    with pytest.raises(ValueError, match="tp 3"):
        Explorer(tp=3)


def test_one_cell_serves_notebook_and_page() -> None:
    bundle, _ = Explorer(batch=2)._repr_mimebundle_()
    assert bundle[VIEW]["model_id"] and '"batch":2' in bundle["text/html"]
    assert bundle["text/html"].count("<tr>") >= 1 + 3


def test_what_the_page_needs_can_be_written_as_json() -> None:
    data = Explorer().data
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert "llama-3.1-70b" in data["models"] and len(data["models"]) >= 60
    assert {"h100-sxm", "b200", "mi300x", "rtx-4090"} <= {name for name, _ in data["gpus"]}


def test_a_compute_message_is_answered() -> None:
    widget = Recorded()
    widget.hear(kind="compute", id=5, params={"context": 1024})
    (reply,) = widget.sent
    assert (reply["id"], reply["ok"], reply["state"]) == (5, True, explorer_state({"context": 1024}))


def test_measure_reports_progress_and_then_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(params, tell, cancelled):
        tell("building")
        return {"asked": params["batch"]}

    monkeypatch.setattr(module, "measure_function", lambda: measure)
    widget = Recorded()
    widget.hear(kind="measure", id=9, params={"batch": 3})
    assert widget.done.wait(10)
    assert widget.sent == [
        {"kind": "progress", "id": 9, "text": "building"},
        {"kind": "measured", "id": 9, "ok": True, "result": {"asked": 3}},
    ]


def test_measure_can_be_cancelled_runs_once_at_a_time_and_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def measure(params, tell, cancelled):
        begun.set()
        while not cancelled():
            threading.Event().wait(0.01)
        raise RuntimeError("cancelled")

    monkeypatch.setattr(module, "measure_function", lambda: measure)
    widget = Recorded()
    widget.hear(kind="measure", id=1, params={})
    assert begun.wait(10)
    widget.hear(kind="measure", id=2, params={})
    assert widget.sent[-1]["error"] == "a measurement is running already"
    widget.done.clear()
    widget.hear(kind="cancel", id=1)
    assert widget.done.wait(10)
    assert widget.sent[-1] == {"kind": "measured", "id": 1, "ok": False, "error": "cancelled"}
    widget.done.clear()
    monkeypatch.setattr(module, "measure_function", lambda: lambda params, tell, cancelled: {})
    widget.hear(kind="measure", id=3, params={})
    assert widget.done.wait(10) and widget.sent[-1]["ok"]


def test_without_a_recorded_quality_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUALITY_RESULT", "no_such_result")
    assert module.recorded_quality() is None
