"""The trace simulator in a kernel: it works in a thread, says how far it is, and can be cancelled."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("anywidget", reason="anywidget is not installed")

from kvlab.simulate import page
from kvlab.simulate.page import simulate_state
from kvlab.widgets import TraceSimulator, live
from kvlab.widgets.kernel import style

CSV = "num_prefill_tokens,num_decode_tokens\n100,20\n3000,30\n"


class Recorded(TraceSimulator):
    """A simulator whose messages to the front end are kept."""

    def __init__(self, **params: object) -> None:
        self.sent: list[dict] = []
        self.done = threading.Event()
        super().__init__(**params)

    def send(self, content: dict, buffers: object = None) -> None:
        self.sent.append(content)
        if content["kind"] == "reply":
            self.done.set()

    def hear(self, **message: object) -> None:
        self._on_message(self, message, [])


def test_a_pasted_trace_is_answered_with_its_figures() -> None:
    widget = Recorded(trace=CSV)
    widget.hear(kind="compute", id=3, params={"trace": CSV, "tp": 8})
    assert widget.done.wait(20)
    assert widget.sent == [{"kind": "reply", "id": 3, "ok": True, "state": simulate_state({"trace": CSV, "tp": 8})}]


def test_it_reports_runs_once_at_a_time_and_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def slow(params: dict, tell) -> dict:
        begun.set()
        while not tell(1, 9, "1 of 9"):
            threading.Event().wait(0.01)
        return {"cancelled": True}

    widget = Recorded(trace=CSV)
    monkeypatch.setattr(page, "simulate_state", slow)
    widget.hear(kind="compute", id=1, params={})
    assert begun.wait(10)
    widget.hear(kind="compute", id=2, params={})
    assert {"kind": "reply", "id": 2, "ok": False, "error": "a simulation is running already"} in widget.sent
    widget.done.clear()
    widget.hear(kind="cancel")
    assert widget.done.wait(10)
    assert widget.sent[-1] == {"kind": "reply", "id": 1, "ok": True, "state": {"cancelled": True}}
    assert {"kind": "progress", "id": 1, "done": 1, "of": 9, "text": "1 of 9"} in widget.sent


def test_only_widgets_that_take_a_while_are_given_tell() -> None:
    told: list[tuple] = []
    message = {"kind": "compute", "id": 1, "params": {"trace": CSV}}
    assert live.answer("simulator", message, lambda *said: told.append(said))["ok"]
    assert live.answer("step_through", {"kind": "compute", "id": 1, "params": {}}, 1 / 1)["ok"]


def test_the_page_gets_a_table_of_settings_and_the_notebook_one_style_sheet() -> None:
    table = TraceSimulator(trace=CSV).fallback_table()
    assert table.count("<tr>") == 1 + 4 and "llama-3.1-8b on 1 x h200" in table
    assert "@import" not in style("simulator") and ".kvs-page" in style("simulator")
