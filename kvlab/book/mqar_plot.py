"""The figures of the recall experiment: accuracy against the bytes a sequence keeps, and against the load."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10
from typing import Any

from kvlab.book.plots import DASHES, PALETTE, SYMBOLS, TEXT, new_figure, show
from kvlab.book.results import provenance

# one colour and one mark per kind of cache
FAMILIES = {
    "attention": ("mha", "gqa", "mqa", "mla"),
    "window": ("window",),
    "state": ("mamba2", "mamba2_wide", "gated_delta"),
    "hybrid": ("hybrid_1_1", "hybrid_1_3", "hybrid_1_7"),
}
STAGGER = (-28, -50, -72)  # pixels from a point up to its label, in turn from left to right


def bytes_figure(result: dict[str, Any], pairs: int) -> Any:
    """One point per model: accuracy at `pairs` pairs over the bytes of a sequence, bars for the 95 % band.

    Raises:
        ValueError: that load is not recorded.
    """
    models = result["models"]
    _check_load(result, pairs)
    fig = new_figure(x="bytes a sequence keeps", y=f"accuracy at {pairs} pairs", log_x=True, height=460)
    for index, (family, names) in enumerate(FAMILIES.items()):
        cells = [models[name]["loads"][str(pairs)] for name in names if name in models]
        fig.add_scatter(
            x=[cell["kv_bytes"] for cell in cells], y=[cell["mean"] for cell in cells], name=family, mode="markers",
            marker={"size": 11, "color": PALETTE[index], "symbol": SYMBOLS[index]}, error_y=_bars(cells),
        )  # fmt: skip
    by_bytes = sorted(models.values(), key=lambda row: row["loads"][str(pairs)]["kv_bytes"])
    for index, row in enumerate(by_bytes):
        _label(fig, row["loads"][str(pairs)], row["label"], STAGGER[index % len(STAGGER)])
    fig.update_layout(yaxis={"range": [-0.03, 1.3], "tickformat": ".0%", "tickvals": [0, 0.25, 0.5, 0.75, 1]})
    return fig


def load_figure(result: dict[str, Any], names: Sequence[str]) -> Any:
    """One line per model of `names`: accuracy over the number of pairs in a sequence, bars for the 95 % band."""
    fig = new_figure(x="pairs in a sequence", y="accuracy", log_x=True, height=420)
    for index, name in enumerate(names):
        row = result["models"][name]
        cells = list(row["loads"].values())
        fig.add_scatter(
            x=[int(pairs) for pairs in row["loads"]], y=[cell["mean"] for cell in cells], name=row["label"],
            mode="lines+markers+text", text=[""] * (len(cells) - 1) + [row["label"]], textposition="middle right",
            line={"color": PALETTE[index % len(PALETTE)], "dash": DASHES[index % len(DASHES)]},
            marker={"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 9}, error_y=_bars(cells), cliponaxis=False,
        )  # fmt: skip
    loads = [int(pairs) for pairs in result["models"][names[0]]["loads"]]
    fig.update_layout(yaxis={"range": [-0.03, 1.05], "tickformat": ".0%"}, margin={"r": 130})
    fig.update_xaxes(tickvals=loads, ticktext=[str(n) for n in loads])
    return fig


def show_bytes(result: dict[str, Any], pairs: int) -> None:
    """Shows `bytes_figure` with a text that says what it shows of this record.

    Raises:
        ValueError: that load is not recorded.
    """
    _check_load(result, pairs)
    cells = {row["label"]: row["loads"][str(pairs)] for row in result["models"].values()}
    order = sorted(cells, key=lambda label: cells[label]["kv_bytes"])
    said = "; ".join(f"{label} {cells[label]['kv_bytes']:,} bytes, {cells[label]['mean']:.0%}" for label in order)
    show(
        bytes_figure(result, pairs),
        alt=f"Accuracy of recall at {pairs} pairs against the bytes a sequence keeps, from fewest bytes to most: {said}.",
        caption=f"{result['conditions']} {provenance(result)}",
    )


def show_loads(result: dict[str, Any], names: Sequence[str]) -> None:
    """Shows `load_figure` of the models `names` with a text that says where each line starts and ends."""
    rows = [result["models"][name] for name in names]
    ends = [(row["label"], list(row["loads"].items())) for row in rows]
    said = "; ".join(f"{x} {c[0][1]['mean']:.0%} at {c[0][0]}, {c[-1][1]['mean']:.0%} at {c[-1][0]}" for x, c in ends)
    show(
        load_figure(result, names),
        alt=f"Accuracy of recall against the number of pairs in a sequence: {said}.",
        caption=f"{result['conditions']} {provenance(result)}",
    )


def _check_load(result: dict[str, Any], pairs: int) -> None:
    loads = next(iter(result["models"].values()))["loads"]
    if str(pairs) not in loads:
        raise ValueError(f"pairs {pairs}: must be one of {', '.join(loads)}")


def _bars(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Error bars from the mean to both ends of the band; none where a single seed is recorded."""
    bands = [cell["band95"] or (cell["mean"], cell["mean"]) for cell in cells]
    means = [cell["mean"] for cell in cells]
    return {
        "type": "data", "symmetric": False, "thickness": 1,
        "array": [high - mean for mean, (_, high) in zip(means, bands, strict=True)],
        "arrayminus": [mean - low for mean, (low, _) in zip(means, bands, strict=True)],
    }  # fmt: skip


def _label(fig: Any, cell: dict[str, Any], text: str, above: int) -> None:
    """Writes `text` above a point, with a thin line down to it."""
    fig.add_annotation(
        x=log10(cell["kv_bytes"]), y=cell["mean"], text=text, ax=0, ay=above, font={"size": 12},
        showarrow=True, arrowhead=0, arrowwidth=1, arrowcolor=TEXT, standoff=7,
    )  # fmt: skip
