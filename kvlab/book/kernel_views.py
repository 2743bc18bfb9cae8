"""What chapter 9 shows of the kernels: accesses of an interpreted run as a figure, and rows of the compiled report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlab.book.plots import new_figure
from kvlab.book.results import load_result, provenance
from kvlab.lab.kernel_access import Example, recorded


def accesses(example: Example, result: str = "kernel_access") -> tuple[list[dict[str, Any]], str]:
    """(accesses of `example`, where they come from): run here, or as recorded where triton does not exist.

    Raises:
        RuntimeError: the run failed where triton is installed.
    """
    try:
        return recorded(example), "run now, in Triton's interpreter"
    except RuntimeError as error:
        if "not installed" not in str(error):
            raise
        kept = load_result(result)
        return kept["accesses"], f"triton exists for Linux only, so this is a recorded run. {provenance(kept)}"


def access_figure(found: Sequence[dict[str, Any]], pages: int) -> Any:
    """Order of the loads against the page that each reads: keys are circles, values diamonds, heads apart by shade."""
    figure = new_figure(x="order of the loads", y="page", height=300)
    shown = [a for a in found if a["segment"] in ("k", "v")]
    for segment, symbol, colour in (("k", "circle", "#0072B2"), ("v", "diamond", "#D55E00")):
        mine = [a for a in shown if a["segment"] == segment]
        figure.add_scatter(
            x=[shown.index(a) for a in mine], y=[a["page"] for a in mine], mode="markers+text",
            marker={"symbol": symbol, "size": 13, "color": colour}, name={"k": "keys", "v": "values"}[segment],
            text=[f"{segment}{len(a['slots'])}" for a in mine], textposition="top center",
            hovertext=[f"{a['bytes']} bytes from byte {a['first']}, lanes {', '.join(map(str, a['lanes']))}" for a in mine],
        )  # fmt: skip
    figure.update_yaxes(tickvals=list(range(pages)), range=[-0.5, pages])
    return figure


def compiled(names: Sequence[str], arch: str = "sm_90") -> list[dict[str, Any]]:
    """Rows of the recorded report (`kvlab kernels --json`) for these configurations on one target.

    Raises:
        ValueError: a configuration that is not recorded for the target.
    """
    rows = {r["config"]: r for r in load_result("kernels")["rows"] if r["arch"] == arch}
    if missing := [n for n in names if n not in rows]:
        raise ValueError(f"names {', '.join(missing)}: not recorded for {arch}")
    return [rows[n] for n in names]


def measured(name: str) -> dict[str, Any] | None:
    """A recorded measurement, or None where there is none: the page then says so."""
    try:
        return load_result(name)
    except FileNotFoundError:
        return None
