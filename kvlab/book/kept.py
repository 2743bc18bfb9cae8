"""What one layer keeps, drawn from its spec, and the same as a table: every architecture of the book is met this way."""

from __future__ import annotations

from typing import Any

from kvlab.book.plots import PALETTE, new_figure, show
from kvlab.book.session import table
from kvlab.plan.derivation import NAMES, part_counts
from kvlab.specs.model import ModelSpec
from kvlab.specs.parts import CacheSpec
from kvlab.specs.units import human_bytes

COLOURS = dict(
    zip(("full", "sliding", "mla", "index", "compressed", "recurrent"), PALETTE, strict=True),
    chunked=PALETTE[1], cross=PALETTE[0], buffer=PALETTE[5], shared="#767676",
)  # fmt: skip
GONE = "rgba(128,128,128,0.18)"
ROW_PIXELS = 56
STATE = 10**9  # stands for "drawn at full height"
MOST_BARS = 64  # more entries than this are drawn as one bar


def kept_figure(model: ModelSpec, tokens: int) -> Any:
    """One row for each thing that a layer of `model` keeps of `tokens` tokens; layers that keep the same are one row.

    A bar covers the tokens whose entries are held (grey: given back), its height grows with the square root of the
    values an entry has. A state, which belongs to no token, stands to the right, always at full height.

    Raises:
        ValueError: tokens is not positive.
    """
    if tokens < 1:
        raise ValueError(f"tokens {tokens}: must be at least 1")
    rows = [row for part, count in part_counts(model) for row in _rows(part, count, tokens)]
    for i, row in enumerate(rows):  # blanks keep rows of one name apart
        row["label"] += " " * sum(other["label"].strip() == row["label"] for other in rows[:i])
    most = max((row["values"] for row in rows if row["values"] != STATE), default=1)
    fig = new_figure(x="token", height=68 + ROW_PIXELS * max(1, len(rows)))
    for row in reversed(rows):
        height = max(0.08, 0.56 * (min(row["values"], most) / most) ** 0.5)
        bars = [(start, length, colour) for start, length, colour in row["bars"] if length]
        fig.add_bar(
            base=[b[0] for b in bars], x=[b[1] for b in bars], y=[row["label"]] * len(bars), orientation="h",
            width=height, name=row["label"], marker={"color": [b[2] for b in bars], "line": {"width": 0}},
            hovertext=row["text"], hoverinfo="text",
        )  # fmt: skip
        fig.add_annotation(
            x=0, y=row["label"], text=row["text"], xanchor="left", yanchor="bottom", showarrow=False,
            yshift=round(ROW_PIXELS * height / 2), font={"size": 12},
        )  # fmt: skip
    fig.update_layout(barmode="overlay", margin={"l": 92, "r": 12, "t": 10, "b": 58}, bargap=0)
    fig.update_xaxes(range=[0, 1.17 * tokens])
    fig.update_yaxes(showgrid=False, ticks="")
    return fig


def show_kept(model: ModelSpec, tokens: int) -> None:
    """Shows `kept_figure` with what it says in words."""
    said = []
    for part, count in part_counts(model):
        held = part.retained(tokens)
        fixed = f"{human_bytes(part.fixed_bytes)} whatever the length" if part.fixed_bytes else f"{held:,} entries"
        said.append(f"{count} layer{'s' * (count > 1)} with {NAMES[part.kind]}: {fixed}")
    if shared := sum(part.kind == "shared" for _, part in model.parts()):
        said.append(f"{shared} layer{'s' * (shared > 1)} with nothing of their own")
    show(
        kept_figure(model, tokens),
        alt=f"After {tokens:,} tokens {model.name} keeps in each layer: " + "; ".join(said) + ".",
        caption=f"{model.name}, what one layer of each kind keeps after {tokens:,} tokens; grey was given back. "
        "Bar height: square root of the values of an entry; states at full height. From kvlab.specs.",
    )


def spec_table(model: ModelSpec) -> None:
    """The specs of `model` as a table, one row for each kind of part."""
    rows = []
    for part, count in part_counts(model):
        kept = " and ".join(f"{r.name} {r.heads} x {r.width}" for r in part.rows()) or _arrays(part)
        rule = part.retention
        size = f" {rule.size:,}" if rule.size else ""
        rows.append((
            count, type(part).__name__, kept, f"{rule.rule}{size}", part.entry_bytes, human_bytes(part.fixed_bytes),
        ))  # fmt: skip
    if shared := [(i, p) for i, p in model.parts() if p.kind == "shared"]:
        sources = sorted({p.source for _, p in shared})  # type: ignore[attr-defined]
        text = f"layers {', '.join(map(str, sources))}" if len(sources) < 5 else f"{len(sources)} layers"
        rows.append((len(shared), "Shared", f"reads {text}", "none", 0, human_bytes(0)))
    table(
        rows,
        ("layers", "spec", "an entry, heads x values, or the state", "keeps", "bytes per entry", "fixed per layer"),
        caption=f"The parts of {model.name}, as kvlab.specs has them.",
    )


def _arrays(part: CacheSpec) -> str:
    return " and ".join(f"{a.name} {a.elements:,}" for a in getattr(part, "arrays", ()))


def _rows(part: CacheSpec, layers: int, tokens: int) -> list[dict[str, Any]]:
    """What one part keeps, a dict per row or array: label, text, values, bars of (start, length, colour)."""
    colour, prefix = COLOURS[part.kind], _short(part)
    held = part.retained(tokens)
    found = []
    for row in part.rows():
        bars = _bars(part, tokens, held, colour)
        found.append({
            "label": f"{prefix}{row.name}", "values": row.heads * row.width, "bars": bars,
            "text": f"{row.heads} x {row.width} values, {held:,} held, {_of(layers)}",
        })  # fmt: skip
    arrays = getattr(part, "arrays", ())
    if part.kind == "buffer":
        sizes = [("open", sum(array.elements for array in arrays))]
    else:
        sizes = [(array.name, array.elements) for array in arrays]
    for name, size in sizes:
        text = f"{size:,} values whatever the length, {_of(layers)}"
        bars = [(1.03 * tokens, 0.11 * tokens, colour)]
        found.append({"label": name, "values": STATE, "bars": bars, "text": text})
    return found


def _of(layers: int) -> str:
    return f"{layers} layer{'s' * (layers > 1)}"


def _short(part: CacheSpec) -> str:
    """What tells rows of the same name apart."""
    rule = part.retention
    return {"window": f"W {rule.size:,} ", "chunk": "chunk ", "stride": f"1/{rule.size} "}.get(rule.rule, "")


def _bars(part: CacheSpec, tokens: int, held: int, colour: str) -> list[tuple[float, float, str]]:
    rule = part.retention
    if rule.rule == "stride":
        if held <= MOST_BARS:
            return [(i * rule.size, 0.85 * rule.size, colour) for i in range(held)]
        return [(0, held * rule.size, colour)]
    if rule.rule in ("window", "chunk"):
        sinks = min(rule.sinks, tokens)
        recent = held - sinks
        return [(0, sinks, colour), (sinks, tokens - sinks - recent, GONE), (tokens - recent, recent, colour)]
    return [(0, held, colour)]
