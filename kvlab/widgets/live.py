"""The live-page mechanism: one widget, one protocol, two places where its Python runs.

A widget is a name, a Python function `compute(params: dict) -> dict` and a front end `<name>.mjs` that exports
anywidget's `render({model, el})`. The front end sends `{"kind": "compute", "id": n, "params": {...}}` and gets
`{"kind": "reply", "id": n, "ok": true, "state": {...}}` or `{"kind": "reply", "id": n, "ok": false, "error": "..."}`.
In a notebook `kvlab.widgets.kernel` answers; in the published page `worker.js` runs this very module in Pyodide.
So this module imports only the standard library.
"""

from __future__ import annotations

import html
import importlib
import json
from collections.abc import Callable
from typing import Any

WIDGETS: dict[str, str] = {
    "explorer": "kvlab.plan.explore:explorer_state",
    "step_through": "kvlab.schedule.story:story_state",
    "simulator": "kvlab.simulate.page:simulate_state",
}
"""name -> "module:function" of each live widget's compute function; later chapters add theirs here."""


TELLING = ("simulator",)
"""Widgets that take a while: their function has a second argument, `tell(done, of, text)`. What it says reaches the
front end as `{"kind": "progress", "id": n, "done": ..., "of": ..., "text": "..."}`; answering true ends the work early."""

Tell = Callable[[int, int, str], object]


def compute_function(widget: str) -> Callable[..., dict[str, Any]]:
    """The function that computes the state of `widget`.

    Raises:
        ValueError: no widget of that name.
    """
    if widget not in WIDGETS:
        raise ValueError(f"widget {widget!r}: must be one of {', '.join(WIDGETS)}")
    module, _, function = WIDGETS[widget].partition(":")
    return getattr(importlib.import_module(module), function)


def answer(widget: str, message: dict[str, Any], tell: Tell | None = None) -> dict[str, Any]:
    """The reply to one `compute` message, as in the module's docstring. Bad input becomes an error reply.

    Only ValueError and OSError, which carry a sentence for people, are turned into replies as they are; any
    other exception is a fault of ours and says so.
    """
    reply: dict[str, Any] = {"kind": "reply", "id": message.get("id")}
    try:
        if message.get("kind") != "compute":
            raise ValueError(f"message kind {message.get('kind')!r}: must be 'compute'")
        params = message.get("params")
        if not isinstance(params, dict):
            raise ValueError(f"params {params!r}: must be an object of settings")
        more = (tell,) if widget in TELLING else ()
        return {**reply, "ok": True, "state": compute_function(widget)(params, *more)}
    except (ValueError, OSError) as error:
        return {**reply, "ok": False, "error": str(error)}
    except Exception as error:  # a reader must see that it broke, not a widget that stands still
        return {**reply, "ok": False, "error": f"internal error, {type(error).__name__}: {error}"}


def answer_json(widget: str, message: str, tell: Tell | None = None) -> str:
    """`answer` with JSON text on both sides: the form that crosses from the worker's JavaScript."""
    return json.dumps(answer(widget, json.loads(message), tell), allow_nan=False)


_MOUNT = """<div class="kvlab-live" data-kvlab-widget="{name}">
<style>html[data-theme] .bd-content div.cell_output .text_html:has(.kvlab-live) \
{{background: transparent !important; color: inherit !important; padding: 0 !important}}</style>
<script type="application/json">{payload}</script>
<div class="kvlab-live-fallback">{fallback}</div>
<p class="kvlab-live-hint" hidden></p>
<noscript><p>This table is fixed; with JavaScript on, its settings can be changed here.</p></noscript>
<script>(() => {{
  const mount = document.currentScript.parentElement;
  if (location.protocol === "file:") {{
    const hint = mount.querySelector(".kvlab-live-hint");
    hint.textContent = "These are the values computed when the book was built. To change the settings, serve the " +
      "book's folder over http (make book, or python -m http.server in the folder of index.html) and open it there.";
    hint.hidden = false;
    return;
  }}
  const root = (document.documentElement.dataset.content_root ?? "") + "_static/";
  const url = new URL(root + "widgets/live.mjs", document.baseURI);
  import(url).then((live) => live.mount(mount, new URL(root, document.baseURI))).catch((error) => {{
    const hint = mount.querySelector(".kvlab-live-hint");
    hint.textContent = "The live version of this table could not be loaded (" + error.message + ").";
    hint.hidden = false;
  }});
}})();</script>
</div>"""


def live_html(
    widget_name: str,
    initial_state: dict[str, Any],
    params: dict[str, Any],
    fallback_table_html: str,
    data: dict[str, Any] | None = None,
) -> str:
    """The static mount of a widget: what a built page holds instead of a kernel's view.

    Args:
        widget_name: a name in `WIDGETS`; the page loads `_static/widgets/<widget_name>.mjs` and `.css`.
        initial_state: compute(params), shown until the reader changes a setting.
        params: the settings of `initial_state`.
        fallback_table_html: a table of at least three settings, all that is left without JavaScript.
        data: what the front end needs besides the state (choices of its menus, recorded measurements).

    Returns:
        One self-contained HTML fragment. It loads nothing from other hosts, and Python only when the reader
        first changes a setting.
    """
    compute_function(widget_name)
    payload = {"widget": widget_name, "params": params, "state": initial_state, "data": data or {}}
    # "<" never appears raw, so no value can end the script element or open a comment in it
    text = json.dumps(payload, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return _MOUNT.format(name=html.escape(widget_name, quote=True), payload=text, fallback=fallback_table_html)


def table_html(caption: str, header: list[str], rows: list[list[str]]) -> str:
    """A plain, captioned table; the first cell of each row is its heading. Text is escaped."""
    cell = html.escape
    head = "".join(f'<th scope="col">{cell(text)}</th>' for text in header)
    body = "".join(
        f'<tr><th scope="row">{cell(row[0])}</th>' + "".join(f"<td>{cell(text)}</td>" for text in row[1:]) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="kvlab-live-table" style="overflow-x:auto" tabindex="0" role="group" aria-label="{cell(caption)}">'
        f"<table><caption>{cell(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
