"""The figure of chapter 2: which query-key pairs each pass of a generation computes, with and without a cache."""

from __future__ import annotations

from typing import Any

from kvlab.book.plots import PALETTE, SYMBOLS, TEXT, new_figure
from kvlab.plan.counts import generation_pairs


def passes_figure(prompt: int, new: int) -> Any:
    """One panel per pass: without a cache in the upper row, with one in the lower; a mark is one dot product per head.

    Raises:
        ValueError: prompt or new is not positive.
    """
    fig = new_figure(x="key position", y="query position", height=430)
    blank = fig.layout.xaxis.to_plotly_json()
    last = prompt + new - 1
    for row, cached in enumerate((False, True)):
        for step, pairs in enumerate(generation_pairs(prompt, new, cached=cached)):
            number = row * new + step + 1
            suffix = str(number) if number > 1 else ""
            fig.add_scatter(
                x=[key for _, key in pairs], y=[query for query, _ in pairs], mode="markers",
                xaxis=f"x{suffix}", yaxis=f"y{suffix}", name=f"{'with' if cached else 'without'}, pass {step + 1}",
                marker={"symbol": SYMBOLS[1 - row], "size": 7, "color": PALETTE[1 - row]},
            )  # fmt: skip
            left, bottom = step / new, 0.52 * (1 - row)
            shared = blank | {"showticklabels": False, "ticks": "", "title": {"text": ""}, "showgrid": False}
            fig.layout[f"xaxis{suffix}"] = shared | {
                "domain": [left + 0.01, left + 1 / new - 0.01], "range": [-0.7, last - 0.3], "anchor": f"y{suffix}",
                "title": {"text": f"pass {step + 1}: {len(pairs)}", "font": {"size": 13}},
            }  # fmt: skip
            fig.layout[f"yaxis{suffix}"] = shared | {
                "domain": [bottom + 0.06, bottom + 0.46], "range": [last - 0.3, -0.7], "anchor": f"x{suffix}",
                "title": {"text": "" if step else f"{'with' if cached else 'without'} a cache"},
            }  # fmt: skip
    fig.update_layout(margin={"l": 40, "r": 10, "t": 10, "b": 30}, font={"color": TEXT})
    return fig
