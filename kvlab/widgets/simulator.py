"""The trace simulator: paste a trace, choose a machine, see what the real scheduler makes of it (front end: simulator.mjs)."""

from __future__ import annotations

import threading
from typing import Any

from kvlab.plan.hardware import gpus
from kvlab.simulate.options import PREFIX
from kvlab.simulate.page import MODELS, WEIGHTS, simulate_state
from kvlab.widgets.kernel import LiveWidget, front_end, style
from kvlab.widgets.live import answer, table_html

FALLBACK: tuple[dict[str, Any], ...] = ({}, {"prefix": "off"}, {"tp": 2}, {"model": "llama-3.1-8b", "tp": 1})
"""The settings of the table that stands for the simulator without JavaScript."""


def fallback_table(states: list[dict[str, Any]]) -> str:
    """The simulator's figures for some settings, as a table."""
    header = [
        "Machine and trace",
        "Prefix cache",
        *(name for name, _, _ in states[0]["cards"]),
        "First token p50 / p99",
    ]
    rows = [
        [state["title"], state["params"]["prefix"], *(value for _, value, _ in state["cards"]),
         f"{state['rows'][0][2]} / {state['rows'][0][4]}" if state["rows"] else "-"]
        for state in states
    ]  # fmt: skip
    return table_html("The simulator's figures for a few settings", header, rows)


class TraceSimulator(LiveWidget):
    """A trace on a machine that is not here: `TraceSimulator(model="llama-3.1-8b", gpu="l4", tp=1)`.

    Settings are those of `kvlab.simulate.page.simulate_state`; without a trace it has a made-up one.
    """

    _esm = front_end("simulator")
    _css = style("simulator")

    def __init__(self, **params: Any) -> None:
        state = simulate_state(params)
        data = {"models": list(MODELS), "gpus": list(gpus()), "weights": list(WEIGHTS), "prefix": list(PREFIX)}
        super().__init__(widget="simulator", params=state["params"], state=state, data=data)
        self._cancel = threading.Event()
        self._running = False

    def fallback_table(self) -> str:
        """This widget's settings and those of FALLBACK, as a table."""
        return fallback_table([dict(self.state), *map(simulate_state, FALLBACK[1:])])

    def handle(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """A simulation runs in a thread, so that the kernel goes on hearing messages: `cancel` among them."""
        if message.get("kind") == "cancel":
            self._cancel.set()
            return None
        if self._running:
            return {"kind": "reply", "id": message.get("id"), "ok": False, "error": "a simulation is running already"}
        self._running = True
        self._cancel.clear()
        threading.Thread(target=self._work, args=(message,), daemon=True).start()
        return None

    def _work(self, message: dict[str, Any]) -> None:
        def tell(done: int, of: int, text: str) -> bool:
            self.send({"kind": "progress", "id": message.get("id"), "done": done, "of": of, "text": text})
            return self._cancel.is_set()

        try:
            reply = answer(self.widget, message, tell)
        finally:
            self._running = False
        self.send(reply)
