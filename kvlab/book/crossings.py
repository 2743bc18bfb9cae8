"""The figure of chapter 15: context against bytes for every architecture of the catalogue, and where lines cross.

Two sliders move it: one picks an architecture and marks where its line crosses the others, one reads all lines at a
context. All positions are computed when the figure is made, so it moves in a page without a kernel.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kvlab.book.plots import DASHES, PALETTE, TEXT, new_figure
from kvlab.plan.crossover import crossings
from kvlab.specs import catalogue
from kvlab.specs.families import from_config
from kvlab.specs.model import ModelSpec
from kvlab.specs.units import human_bytes

# one model for each way to keep, by (label, catalogue name); a test holds that the catalogue has no other way
ARCHITECTURES: tuple[tuple[str, str], ...] = (
    ("MHA", "llama-2-7b"),
    ("GQA", "llama-3.1-8b"),
    ("MQA", "falcon-7b"),
    ("full + encoder", "llama-3.2-11b-vision"),
    ("windows", "mistral-7b-v0.1"),
    ("windows + full", "gemma-3-12b"),
    ("windows, shared", "gemma-4-e4b"),
    ("chunks + full", "llama-4-scout"),
    ("MLA", "deepseek-v3"),
    ("MLA + index", "deepseek-v3.2"),
    ("compressed", "deepseek-v4-pro"),
    ("Mamba-1", "falcon-mamba-7b"),
    ("Mamba-2", "mamba-codestral-7b"),
    ("Mamba-1 + full", "jamba-1.5-mini"),
    ("Mamba-2 + full", "nemotron-h-8b"),
    ("delta + full", "qwen3-next-80b-a3b"),
    ("KDA + MLA", "kimi-linear-48b-a3b"),
    ("short conv + full", "lfm2-2.6b"),
    ("lightning + full", "minimax-m1"),
)
CONTEXTS = tuple(round(2 ** (p / 2)) for p in range(16, 45))  # 256 to 4M tokens, two to each doubling
START = ("Mamba-1 + full", 131072)


@cache
def models() -> dict[str, ModelSpec]:
    """The models of ARCHITECTURES by label, bf16, states in fp32."""
    return {label: from_config(catalogue.get(name), name=name) for label, name in ARCHITECTURES}


def ways_to_keep(model: ModelSpec) -> frozenset[str]:
    """The kinds of part a model has, recurrences by name; what tells architectures of the catalogue apart."""
    return frozenset(p.mechanism if p.kind == "recurrent" else p.kind for _, p in model.parts())  # type: ignore[attr-defined]


def crossing_points(label: str) -> list[tuple[int, int, str]]:
    """(tokens, bytes, other label) wherever the line of `label` crosses another between the ends of the figure."""
    model, found = models()[label], []
    for other, than in models().items():
        if other != label:
            for n in crossings(model, than, CONTEXTS[-1]):
                if n > CONTEXTS[0]:
                    found.append((n, model.bytes_at(n), other))
    return sorted(found)


def crossings_figure() -> Any:
    """The draggable figure; see the module's docstring."""
    fig = new_figure(x="context (tokens)", y="cache of one sequence (bytes)", log_x=True, log_y=True, height=660)
    ends: list[float] = []
    for i, (label, model) in enumerate(models().items()):
        sizes = [model.bytes_at(n) for n in CONTEXTS]
        apart = all(max(sizes[-1] / e, e / sizes[-1]) > 1.7 for e in ends)
        ends += [float(sizes[-1])] * apart
        fig.add_scatter(
            x=CONTEXTS, y=sizes, name=label, mode="lines+text", opacity=0.75, textposition="middle right",
            text=[""] * (len(CONTEXTS) - 1) + [label if apart else ""], textfont={"size": 11},
            line={"color": PALETTE[i % len(PALETTE)], "dash": DASHES[i % len(DASHES)], "width": 1.5},
            hovertemplate=f"{label}, {model.name}: %{{y:.3s}}B at %{{x:,}} tokens<extra></extra>",
        )  # fmt: skip
    fig.add_scatter(mode="lines", line={"color": TEXT, "width": 5}, opacity=0.9, hoverinfo="skip")
    fig.add_scatter(mode="markers", marker={"symbol": "diamond", "size": 11, "color": PALETTE[1]}, hoverinfo="text")
    fig.add_scatter(
        mode="markers", marker={"symbol": "circle", "size": 8, "color": TEXT}, hoverinfo="skip", name="read"
    )
    lines = len(ARCHITECTURES)
    pick = [_pick(label, lines) for label, _ in ARCHITECTURES]
    read = [_read(n, lines + 2) for n in CONTEXTS]
    start = (list(models()).index(START[0]), CONTEXTS.index(START[1]))
    for trace, (x, y) in zip(
        (lines, lines + 1), zip(*(pick[start[0]]["args"][0][a] for a in "xy"), strict=True), strict=True
    ):
        fig.data[trace].update(x=x, y=y)
    fig.data[lines].name, fig.data[lines + 1].name = pick[start[0]]["args"][0]["name"]
    fig.data[lines + 1].hovertext = pick[start[0]]["args"][0]["hovertext"][1]
    fig.data[lines + 2].update(x=read[start[1]]["args"][0]["x"][0], y=read[start[1]]["args"][0]["y"][0])
    fig.add_annotation(
        xref="paper", yref="paper", x=0, y=1.0, xanchor="left", yanchor="bottom", showarrow=False, align="left",
        text=read[start[1]]["args"][1]["annotations[0].text"], font={"size": 13},
    )  # fmt: skip
    fig.update_layout(
        sliders=[_slider("architecture: ", pick, start[0], -0.2), _slider("context: ", read, start[1], -0.42)]
    )
    fig.update_layout(margin={"l": 64, "r": 8, "t": 86, "b": 250})
    fig.update_xaxes(range=[2.3, 7.9], dtick=1).update_yaxes(dtick=1)
    return fig


def _pick(label: str, trace: int) -> dict[str, Any]:
    """The slider step that draws `label` bold and marks its crossings."""
    points, model = crossing_points(label), models()[label]
    texts = [f"{label} and {other}: equal at {n:,} tokens, {human_bytes(size)}" for n, size, other in points]
    data = {
        "x": [list(CONTEXTS), [p[0] for p in points]],
        "y": [[model.bytes_at(n) for n in CONTEXTS], [p[1] for p in points]],
        "hovertext": ["", texts],
        "name": [label, f"crossings of {label}"],
    }
    return {"method": "restyle", "label": label, "args": [data, [trace, trace + 1]]}


def _read(tokens: int, trace: int) -> dict[str, Any]:
    """The slider step that reads all lines at `tokens` tokens."""
    sizes = sorted((model.bytes_at(tokens), label) for label, model in models().items())
    (least, small), (most, large) = sizes[0], sizes[-1]
    text = (
        f"{tokens:,} tokens<br>least: {small}, {human_bytes(least)}<br>most: {large}, {human_bytes(most)}<br>"
        f"{most / least:,.0f} times the least"
    )
    data = {"x": [[tokens] * len(sizes)], "y": [[size for size, _ in sizes]]}
    label = f"{tokens / 1024:,.0f}k" if tokens < 2**20 else f"{tokens / 2**20:.1f}M".replace(".0M", "M")
    return {
        "method": "update",
        "label": label if tokens >= 1024 else str(tokens),
        "args": [data, {"annotations[0].text": text}, [trace]],
    }


def _slider(prefix: str, steps: list[dict[str, Any]], active: int, y: float) -> dict[str, Any]:
    return {
        "active": active, "steps": steps, "x": 0, "len": 1.0, "y": y, "yanchor": "top", "pad": {"t": 4, "b": 4},
        "currentvalue": {"prefix": prefix, "font": {"size": 14}}, "font": {"size": 10}, "ticklen": 3,
        "bgcolor": "rgba(128,128,128,0.35)", "activebgcolor": PALETTE[1], "bordercolor": TEXT,
    }  # fmt: skip
