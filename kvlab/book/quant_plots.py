"""The figures of chapter 8: how large channels and tokens of keys and values are, and what formats cost and lose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from kvlab.book.plots import new_figure
from kvlab.lab.format_report import bits_held
from kvlab.specs.formats import FORMATS

Layer = tuple[torch.Tensor, torch.Tensor]


def channel_sizes(layers: Sequence[Layer]) -> dict[str, torch.Tensor]:
    """For keys and for values: |value| of every channel at the median token over its head's median channel, largest
    first. A channel that is large at a few tokens only is not large here.

    Returns:
        name -> fp32 [layers * Hkv, D], each row sorted downwards.
    """
    found = {}
    for i, name in enumerate(("keys", "values")):
        typical = torch.cat([layer[i].abs().median(0).values for layer in layers])
        found[name] = (typical / typical.median(-1, keepdim=True).values).sort(-1, descending=True).values
    return found


def channels_figure(layers: Sequence[Layer]) -> Any:
    """Sizes of channels, keys and values side by side: the median head and the most extreme tenth."""
    figure = new_figure(
        x="channel of a head, largest first", y="|value| at the median token, median channel is 1", log_y=True
    )
    looks = {"keys": ("solid", "circle"), "values": ("dash", "diamond")}
    for name, sizes in channel_sizes(layers).items():
        for label, share in (("median head", 0.5), ("one head in ten", 0.9)):
            line = sizes.quantile(share, dim=0).tolist()
            dash, marker = looks[name]
            figure.add_scatter(
                x=list(range(1, len(line) + 1)), y=line, name=f"{name}, {label}", mode="lines+markers",
                line={"dash": dash, "width": 2 if share == 0.5 else 1}, marker={"symbol": marker, "size": 4},
            )  # fmt: skip
    return figure


def heat_figure(rows: torch.Tensor, title: str) -> Any:
    """|rows| [tokens, D] as a picture, tokens downwards."""
    figure = new_figure(x="channel", y="token", height=300)
    figure.add_heatmap(z=rows.abs().tolist(), colorscale="Viridis", colorbar={"title": "|value|"}, name=title)
    figure.update_yaxes(autorange="reversed")
    return figure


def quality_points(result: dict[str, Any], heads: int = 3, head_dim: int = 64) -> list[tuple[str, float, dict]]:
    """(format, bits per value that a recorded segment held, its scores) of every plain format, most bits first."""
    names, tokens = [name for name in result["formats"] if name in FORMATS], result["segment_tokens"]
    points = [(n, bits_held(n, heads, head_dim, tokens), result["formats"][n]) for n in names]
    return sorted(points, key=lambda point: (-point[1], point[2]["kl"]["mean"]))


def quality_figure(result: dict[str, Any]) -> Any:
    """KL divergence against the bits per value that a segment held, below 16, with the band over segments."""
    figure = new_figure(x="bits held per value", y="KL divergence (nats per token)", log_y=True, height=480)
    marks = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star", "hexagon")
    points = [point for point in quality_points(result) if point[1] < 16]
    sides = label_sides([(bits, math.log10(scores["kl"]["mean"]), name) for name, bits, scores in points], 0.08, 0.15)
    for i, (name, bits, scores) in enumerate(points):
        mean, (low, high) = scores["kl"]["mean"], scores["kl"]["band95"]
        figure.add_scatter(
            x=[bits], y=[mean], name=name, mode="markers+text", text=[name], textposition=sides[name],
            marker={"symbol": marks[i % len(marks)], "size": 9}, showlegend=False,
            error_y={"type": "data", "symmetric": False, "array": [high - mean], "arrayminus": [mean - max(low, mean / 10)]},
        )  # fmt: skip
    figure.update_xaxes(range=[min(bits for _, bits, _ in points) - 1, max(bits for _, bits, _ in points) + 1.5])
    return figure


def retrieval_figure(quality: dict[str, Any], passkey: dict[str, Any]) -> Any:
    """Share of numbers retrieved against KL divergence of the next token, a point for every format below 16 bits with both."""
    figure = new_figure(x="KL divergence (nats per token)", y="numbers retrieved (%)", log_x=True, height=480)
    found = {
        n: [sum(row[key] for row in rows.values()) for key in ("retrieved", "of")]
        for n, rows in passkey["formats"].items()
    }
    points = [
        (n, scores["kl"]["mean"], 100 * found[n][0] / found[n][1])
        for n, bits, scores in quality_points(quality)
        if n in found and bits < 16
    ]
    sides = label_sides([(math.log10(kl), share, name) for name, kl, share in points], 0.036, 4.5)
    for name, kl, share in points:
        figure.add_scatter(
            x=[kl], y=[share], name=name, mode="markers+text", text=[name], textposition=sides[name],
            marker={"size": 9}, showlegend=False,
        )  # fmt: skip
    figure.update_yaxes(range=[0, 112])
    sizes = [kl for _, kl, _ in points]
    figure.update_xaxes(range=[math.log10(min(sizes)) - 0.4, math.log10(max(sizes)) + 0.4])
    return figure


def label_sides(points: Sequence[tuple[float, float, str]], char: float = 0.075, line: float = 0.15) -> dict[str, str]:
    """For each (x, y, name) the first side on which its label meets no other point and no label placed before.

    Args:
        char, line: width of a letter and height of a line, in units of x and y.
    """
    taken = [(x - char, x + char, y - line / 2, y + line / 2) for x, y, _ in points]
    sides = {}
    for x, y, name in points:
        width = char * len(name)
        boxes = {
            "middle right": (x + char, x + char + width, y - line / 2, y + line / 2),
            "middle left": (x - char - width, x - char, y - line / 2, y + line / 2),
            "top center": (x - width / 2, x + width / 2, y + line / 2, y + 1.5 * line),
            "bottom center": (x - width / 2, x + width / 2, y - 1.5 * line, y - line / 2),
            "top right": (x, x + width, y + line / 2, y + 1.5 * line),
            "bottom right": (x, x + width, y - 1.5 * line, y - line / 2),
            "top left": (x - width, x, y + line / 2, y + 1.5 * line),
            "bottom left": (x - width, x, y - 1.5 * line, y - line / 2),
        }
        free = [
            s
            for s, (a, b, c, d) in boxes.items()
            if not any(a < t[1] and t[0] < b and c < t[3] and t[2] < d for t in taken)
        ]
        sides[name] = free[0] if free else "top center"
        taken.append(boxes[sides[name]])
    return sides
