"""The explorer in a kernel: its messages, its mime bundle, and Measure in a thread that can be cancelled."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

pytest.importorskip("anywidget", reason="anywidget is not installed")

from kvlab.book import gpu_record
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


RECORD = {
    "what": "planted", "date": "2026-01-02", "commit": "c" * 40, "device": "another", "versions": {}, "command": "none",
    "stages": {
        "check": {"wrong": [], "errors": {}},
        "decode": {"bf16 x 8": {"us": 80.0, "gb_per_s": 3400.0, "of_copy": 0.81, "target_of_copy": 0.8, "bytes": 1},
                   "int4 x 1": {"us": 9.25, "gb_per_s": 1200.0}, "int8 x 1": {"not measured": "ValueError: no"},
                   "left out": ["mxfp4 x 32"]},
        "models": {"llama-3.1-8b x 8": {"ms": 1.25, "batch": 8, "context": 8192, "gb_per_s": 3300.0},
                   "jamba-1.5-mini x 8": {"not measured": "layers without a decode kernel"}},
    },
    "measured": {
        n: {"device": "NVIDIA <H200>", "commit": "d" * 40, "date": "2026-01-01"} for n in ("check", "decode", "models")
    },
}  # fmt: skip


def planted(record: dict | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`book/results` of this test: the record of a GPU, or none."""
    if record is not None:
        (folder / "bench_gpu.json").write_text(json.dumps(record), encoding="utf-8")
    monkeypatch.setattr("kvlab.book.results.results_dir", lambda: folder)


def test_without_a_gpu_record_the_explorer_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of the kernels is no measurement: the interpreter can do that."""
    for record in (None, RECORD | {"stages": {"check": {"wrong": []}}}):
        planted(record, tmp_path, monkeypatch)
        widget = module.Explorer()
        assert widget.data["gpu"] == {"text": gpu_record.NOT_MEASURED, "models": {}}
        assert widget.static_html().count(gpu_record.NOT_MEASURED) == 2, "for the front end, and without JavaScript"


def test_a_gpu_record_is_quoted_with_the_device_of_its_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(RECORD, tmp_path, monkeypatch)
    gpu = module.Explorer().data["gpu"]
    assert gpu["models"] == {
        "llama-3.1-8b": "Measured on NVIDIA <H200>: reading this model's cache takes 1.25 ms a step of 8 sequences of "
        "8,192 tokens in bf16, at 3,300 GB/s."
    }
    assert gpu["text"] == "Measured on NVIDIA <H200>: llama-3.1-8b. For these settings times are bounds."
    html = module.Explorer().static_html()
    assert "<p>Measured on NVIDIA &lt;H200&gt;: llama-3.1-8b." in html and gpu_record.NOT_MEASURED not in html
    assert gpu_record.decode_table(RECORD) == [
        ["decode", "bf16 x 8", "80.0", "3,400", "81%", "80%"], ["decode", "int4 x 1", "9.2", "1,200", "-", "-"],
    ]  # fmt: skip
    assert gpu_record.not_measured(RECORD) == [
        "decode: mxfp4 x 32: no time was left", "decode: int8 x 1: ValueError: no",
        "models: jamba-1.5-mini x 8: layers without a decode kernel",
    ]  # fmt: skip
    assert "NVIDIA <H200>" in gpu_record.origin(RECORD, "decode") and "dddddddddd, 2026-01-01" in gpu_record.origin(
        RECORD, "decode"
    )


def test_without_a_recorded_quality_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUALITY_RESULT", "no_such_result")
    assert module.recorded_quality() is None
