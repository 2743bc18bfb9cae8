"""The figures of the recall experiment: accuracy against the bytes a sequence keeps, and against the load."""

from __future__ import annotations

from typing import Any

from kvlab.book.plots import DASHES, PALETTE, SYMBOLS, new_figure

# one colour and mark per kind of cache; labels stand at the points
FAMILIES = {
    "attention": ("mha", "gqa", "mqa", "mla"),
    "window": ("window",),
    "state": ("mamba2", "mamba2_wide", "gated_delta"),
    "hybrid": ("hybrid_1_1", "hybrid_1_3", "hybrid_1_7"),
}


def bytes_figure(result: dict[str, Any], pairs: int) -> Any:
    """One point per model: accuracy at `pairs` pairs over the bytes of a sequence, bars for the 95 % band.

    Raises:
        ValueError: that load is not recorded.
    """
    loads = next(iter(result["models"].values()))["loads"]
    if str(pairs) not in loads:
        raise ValueError(f"pairs {pairs}: must be one of {', '.join(loads)}")
    fig = new_figure(x="bytes a sequence keeps", y=f"accuracy at {pairs} pairs", log_x=True, height=440)
    for index, (family, names) in enumerate(FAMILIES.items()):
        rows = [result["models"][name] for name in names if name in result["models"]]
        cells = [row["loads"][str(pairs)] for row in rows]
        mean = [cell["mean"] for cell in cells]
        fig.add_scatter(
            x=[cell["kv_bytes"] for cell in cells], y=mean, mode="markers+text", name=family,
            text=[row["label"] for row in rows], textposition="bottom center", textfont={"size": 12},
            marker={"size": 11, "color": PALETTE[index], "symbol": SYMBOLS[index]},
            error_y={
                "type": "data", "symmetric": False, "thickness": 1,
                "array": [cell["band95"][1] - cell["mean"] for cell in cells],
                "arrayminus": [cell["mean"] - cell["band95"][0] for cell in cells],
            },
        )  # fmt: skip
    fig.update_layout(yaxis={"range": [-0.05, 1.1], "tickformat": ".0%"})
    return fig


def load_figure(result: dict[str, Any], names: tuple[str, ...]) -> Any:
    """One line per model of `names`: accuracy over the number of pairs in a sequence, bars for the 95 % band."""
    fig = new_figure(x="pairs in a sequence", y="accuracy", log_x=True, height=400)
    for index, name in enumerate(names):
        row = result["models"][name]
        cells = list(row["loads"].values())
        fig.add_scatter(
            x=[int(pairs) for pairs in row["loads"]], y=[cell["mean"] for cell in cells], name=row["label"],
            mode="lines+markers+text", text=[""] * (len(cells) - 1) + [row["label"]], textposition="middle right",
            line={"color": PALETTE[index % len(PALETTE)], "dash": DASHES[index % len(DASHES)]},
            marker={"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 9},
            error_y={
                "type": "data", "symmetric": False, "thickness": 1,
                "array": [cell["band95"][1] - cell["mean"] for cell in cells],
                "arrayminus": [cell["mean"] - cell["band95"][0] for cell in cells],
            },
        )  # fmt: skip
    loads = [int(pairs) for pairs in result["models"][names[0]]["loads"]]
    fig.update_layout(yaxis={"range": [-0.05, 1.1], "tickformat": ".0%"})
    fig.update_xaxes(tickvals=loads, ticktext=[str(n) for n in loads], autorange=True)
    return fig
