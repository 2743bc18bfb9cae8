"""Figures: one plotly template, drawn from data, readable in light and dark, on a page without a kernel.

A figure is emitted twice in one output: as plotly's own type, which JupyterLab draws, and as a small piece of HTML,
which the built page draws with the single plotly.js of the book's `_static/vendor` folder, fetched when the first
figure of a page asks for it. Colours of text and axes are left to the page's style sheet (`kvlab.css`), so that they
follow the theme.
"""

from __future__ import annotations

import html
import itertools
import json
from typing import Any

from kvlab.book.session import _display

# Okabe and Ito's colour-blind safe palette, without its black and yellow, which vanish on one of the two grounds
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross")
TEXT = "#767676"  # 4.5:1 on white, and the style sheet replaces it by the theme's own text colour

ROWS_PER_SERIES = 200
_serial = itertools.count(1)

_LOADER = """<script>(() => {{
  const root = document.documentElement.dataset.content_root ?? './';
  window.kvPlotly ??= new Promise((done, failed) => {{
    const s = document.createElement('script'); s.src = root + '_static/vendor/plotly.min.js';
    s.onload = () => done(window.Plotly); s.onerror = failed; document.head.append(s); }});
  const box = document.getElementById('{name}');
  window.kvPlotly.then(p => p.newPlot(box, {data}, {layout}, {{displayModeBar: false, responsive: true}}))
    .catch(() => {{ box.textContent = 'The figure needs the book to be served over http; its data stand below.';
      box.closest('figure')?.querySelector('details')?.setAttribute('open', ''); }});
}})();</script>"""


def new_figure(x: str = "", y: str = "", *, log_x: bool = False, log_y: bool = False, height: int = 380) -> Any:
    """An empty plotly figure in the book's template, axes titled with their units."""
    import plotly.graph_objects as go

    axis = {"gridcolor": "rgba(128,128,128,0.25)", "linecolor": TEXT, "ticks": "outside", "zeroline": False}
    layout = {
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "colorway": list(PALETTE),
        "font": {"color": TEXT, "size": 14}, "height": height, "showlegend": False,
        "margin": {"l": 70, "r": 20, "t": 20, "b": 60}, "hovermode": "closest",
        "xaxis": axis | {"title": {"text": x + (" (log scale)" if log_x else "")}, "type": "log" if log_x else "-"},
        "yaxis": axis | {"title": {"text": y + (" (log scale)" if log_y else "")}, "type": "log" if log_y else "-"},
    }  # fmt: skip
    return go.Figure(layout=go.Layout(layout, template="none"))


def show(figure: Any, *, alt: str, caption: str) -> None:
    """Shows `figure` with its message in `alt` and its source and conditions in `caption`.

    The data stay reachable as a table under the figure, also without JavaScript.

    Raises:
        ValueError: alt or caption is empty.
    """
    if not alt.strip() or not caption.strip():
        raise ValueError("alt and caption: must say what the figure shows and where its data come from")
    _name_lines(figure)
    spec = json.loads(figure.to_json())
    name = f"kv-figure-{next(_serial)}"
    script = _LOADER.format(
        name=name,
        data=json.dumps(spec["data"]).replace("</", "<\\/"),
        layout=json.dumps(spec["layout"]).replace("</", "<\\/"),
    )
    markup = (
        f'<figure class="kv-figure"><div id="{name}" class="kv-plot" role="img" aria-label="{html.escape(alt)}" '
        f'style="min-height:{spec["layout"].get("height", 380)}px"></div>'
        f"<figcaption>{html.escape(caption)}</figcaption>{_data_table(figure)}</figure>{script}"
    )
    _display(
        {
            "application/vnd.plotly.v1+json": {"data": spec["data"], "layout": spec["layout"]},
            "text/html": markup,
            "text/plain": f"{alt}\n{caption}",
        }
    )


def _name_lines(figure: Any) -> None:
    """Turns the legend on where several named lines or point sets carry no text of their own to be told apart by."""
    named = [t for t in figure.data if t.type == "scatter" and t.name and t.showlegend is not False]
    told = any(any(t.text) if isinstance(t.text, tuple | list) else t.text for t in named)
    one_panel = len({(t.xaxis, t.yaxis) for t in figure.data if t.type == "scatter"}) == 1
    if len(named) > 1 and one_panel and not told and not figure.layout.annotations and not figure.layout.showlegend:
        legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
        figure.update_layout(showlegend=True, legend=legend, margin_t=50)


def _data_table(figure: Any) -> str:
    """The figure's points as a folded table; of a series of more than 200 points it says how many are left out."""
    rows, left_out = [], 0
    for trace in figure.data:
        label, points = trace.name or "", list(zip(_values(trace, "x"), _values(trace, "y"), strict=False))
        left_out += max(0, len(points) - ROWS_PER_SERIES)
        for x, y in points[:ROWS_PER_SERIES]:
            rows.append(f"<tr><td>{html.escape(label)}</td><td>{_cell(x)}</td><td>{_cell(y)}</td></tr>")
    if not rows:
        return ""
    head = "".join(
        f'<th scope="col">{html.escape(t or "value")}</th>'
        for t in ("series", figure.layout.xaxis.title.text, figure.layout.yaxis.title.text)
    )
    note = f"<p>{left_out:,} further points are not listed.</p>" if left_out else ""
    return (
        '<details class="kv-data"><summary>The data of this figure</summary><div class="kv-table" tabindex="0" '
        f'role="region" aria-label="Data of the figure"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{note}</details>"
    )


def _values(trace: Any, axis: str) -> list:
    values = getattr(trace, axis, None)
    return [] if values is None else list(values)


def _cell(value: Any) -> str:
    return html.escape(f"{value:,.6g}" if isinstance(value, float) else str(value))
