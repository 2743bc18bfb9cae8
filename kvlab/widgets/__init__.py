"""Widgets that run the same Python in a notebook's kernel and in the reader's browser.

`live` is the mechanism (standard library only), `kernel` its Jupyter side; the others are
widgets. Importing this package imports neither anywidget nor torch; a widget does so when it is first asked for.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Explorer", "StepThrough", "TraceSimulator", "explorer_state", "live_html"]


def __getattr__(name: str) -> Any:
    if name == "Explorer":
        from kvlab.widgets.explorer import Explorer

        return Explorer
    if name == "StepThrough":
        from kvlab.widgets.step_through import StepThrough

        return StepThrough
    if name == "TraceSimulator":
        from kvlab.widgets.simulator import TraceSimulator

        return TraceSimulator
    if name == "explorer_state":
        from kvlab.plan.explore import explorer_state

        return explorer_state
    if name == "live_html":
        from kvlab.widgets.live import live_html

        return live_html
    raise AttributeError(f"module 'kvlab.widgets' has no attribute {name!r}")
