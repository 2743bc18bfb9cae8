"""The explorer: a model, a machine, and what fits; one widget for notebook and page (front end: explorer.mjs)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from html import escape
from typing import Any

import traitlets

from kvlab.plan.explore import ATTENTION, explorer_state
from kvlab.plan.hardware import gpus
from kvlab.plan.policies import POLICIES
from kvlab.specs import catalogue
from kvlab.specs.formats import FORMATS
from kvlab.specs.units import gib
from kvlab.widgets.kernel import FOLDER, LiveWidget, front_end
from kvlab.widgets.live import table_html

QUALITY_RESULT = "quality_kv_formats"
FALLBACK: tuple[dict[str, Any], ...] = (
    {"model": "llama-3.1-8b", "context": 32768, "batch": 8},
    {"model": "llama-3.1-70b", "context": 32768, "batch": 16, "tp": 4},
    {"model": "gemma-3-27b", "context": 131072, "batch": 1},
    {"model": "deepseek-v3", "context": 131072, "batch": 16, "tp": 8, "gpu": "h200", "weight_dtype": "fp8_e4m3"},
)
"""The settings of the table that stands for the explorer without JavaScript, after the widget's own."""


def front_end_data() -> dict[str, Any]:
    """What the front end's menus offer, the recorded quality of storage formats (None when not recorded), and
    what was measured on a GPU."""
    from kvlab.book.gpu_record import explorer_words

    return {
        "models": list(catalogue.names()),
        "gpus": [[gpu.name, f"{gpu.name} ({gpu.marketing_memory})"] for gpu in gpus().values()],
        "weight_formats": [name for name, fmt in FORMATS.items() if not fmt.group_tokens],
        "kv_formats": list(FORMATS),
        "attention": list(ATTENTION),
        "policies": list(POLICIES),
        "quality": recorded_quality(),
        "gpu": explorer_words(),
    }


def recorded_quality() -> dict[str, Any] | None:
    """What the explorer shows of the recorded quality: means and bands per format, and the conditions."""
    from kvlab.book.results import load_result, provenance

    try:
        result = load_result(QUALITY_RESULT)
    except FileNotFoundError:
        return None
    conditions = f"{result['conditions']} {provenance(result)}"
    return {"baseline": result["baseline"], "formats": result["formats"], "conditions": conditions}


def fallback_table(states: list[dict[str, Any]]) -> str:
    """The explorer's figures for some settings, as a table."""
    header = ["Model", "GPUs", "Context (tokens)", "Batch (sequences)", "Weights in", "KV cache in",
              "Cache of one sequence", "Needed per GPU, unused share included",
              "Of", "Sequences that fit", "Decode (tokens/s)"]  # fmt: skip
    rows = []
    for state in states:
        p, memory = state["params"], state["memory"]
        rows.append([
            state["name"], f"{p['tp']} x {state['gpu']}", f"{p['context']:,}", f"{p['batch']:,}",
            p["weight_dtype"], p["kv_dtype"],
            gib(state["kv_bytes"]), gib(memory["used_bytes"]), gib(memory["capacity_bytes"]),
            f"{state['max_concurrent']:,}",
            f"{state['decode']['tokens_per_s']:,.0f}" if p["batch"] <= state["max_concurrent"] else "does not fit",
        ])  # fmt: skip
    return table_html("The explorer's figures for a few settings", header, rows)


class Explorer(LiveWidget):
    """The explorer at the settings given, such as `Explorer(model="llama-3.1-70b", tp=4)`.

    Settings are the controls of `kvlab.plan.explore.explorer_state`; `state` always holds its answer to `params`.
    """

    _esm = front_end("explorer")
    _css = FOLDER / "explorer.css"
    measuring = traitlets.Bool(False)

    def __init__(self, **params: Any) -> None:
        state = explorer_state(params)
        super().__init__(widget="explorer", params=state["params"], state=state, data=front_end_data())
        self._cancel = threading.Event()

    def fallback_table(self) -> str:
        """This widget's settings and those of FALLBACK, as a table, and whether a GPU was measured."""
        words = f"<p>{escape(self.data['gpu']['text'])}</p>"
        return fallback_table([dict(self.state), *(explorer_state(p) for p in FALLBACK)]) + words

    def handle(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """As in the base class; `measure` and `cancel` besides, which a page without a kernel does not offer."""
        if message.get("kind") == "measure":
            return self._start(message.get("id"), message.get("params") or {})
        if message.get("kind") == "cancel":
            self._cancel.set()
            return None
        return super().handle(message)

    def _start(self, identity: Any, params: dict[str, Any]) -> dict[str, Any] | None:
        """Measures in a thread, so that the kernel goes on hearing messages: a cancel among them."""
        if self.measuring:
            return {"kind": "measured", "id": identity, "ok": False, "error": "a measurement is running already"}
        self.measuring = True
        self._cancel.clear()
        threading.Thread(target=self._measure, args=(identity, params), daemon=True).start()
        return None

    def _measure(self, identity: Any, params: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"kind": "measured", "id": identity}
        try:
            reply |= {"ok": True, "result": measure_function()(params, self._tell(identity), self._cancel.is_set)}
        except Exception as error:  # told to the reader: a thread's traceback would reach nobody
            reply |= {"ok": False, "error": str(error) or type(error).__name__}
        finally:
            self.measuring = False
        self.send(reply)

    def _tell(self, identity: Any) -> Callable[[str], None]:
        return lambda text: self.send({"kind": "progress", "id": identity, "text": text})


def measure_function() -> Callable[..., dict[str, Any]]:
    """`kvlab.lab.measure.measure`, imported when first needed: it brings torch."""
    from kvlab.lab.measure import measure

    return measure
