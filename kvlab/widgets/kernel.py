"""The Jupyter side of a live widget: an anywidget whose messages Python answers in the kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from kvlab.widgets.live import answer, live_html

FOLDER = Path(__file__).parent
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./parts\.mjs";\n', re.M)
_CSS_IMPORT = re.compile(r'^@import "([a-z_]+\.css)";\n', re.M)


def front_end(name: str) -> str:
    """The module `<name>.mjs` as one text: a notebook cannot resolve its import of `parts.mjs`, a page can."""
    shared = (FOLDER / "parts.mjs").read_text(encoding="utf-8").replace("export function", "function")
    return _IMPORT.sub(lambda _: shared, (FOLDER / f"{name}.mjs").read_text(encoding="utf-8"))


def style(name: str) -> str:
    """The style sheet `<name>.css` as one text, its imports inlined as in `front_end`."""
    text = (FOLDER / f"{name}.css").read_text(encoding="utf-8")
    return _CSS_IMPORT.sub(lambda found: (FOLDER / found[1]).read_text(encoding="utf-8"), text)


class LiveWidget(anywidget.AnyWidget):
    """A widget of `kvlab.widgets.live`, with a kernel behind it.

    One cell serves notebook and book: displayed, it offers the widget view (JupyterLab takes it) and the static
    mount as text/html (the book takes that, its widget views being switched off in `_config.yml`).
    """

    widget = traitlets.Unicode().tag(sync=True)
    params = traitlets.Dict().tag(sync=True)
    state = traitlets.Dict().tag(sync=True)
    data = traitlets.Dict().tag(sync=True)
    backend = traitlets.Unicode("kernel").tag(sync=True)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.on_msg(self._on_message)

    def fallback_table(self) -> str:
        """The table that stands for the widget without JavaScript."""
        raise NotImplementedError

    def handle(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """The reply to one message of the front end; None when it is answered later."""
        return answer(self.widget, message)

    def _on_message(self, _widget: Any, message: Any, _buffers: Any) -> None:
        reply = self.handle(message if isinstance(message, dict) else {})
        if reply is not None:
            self.send(reply)

    def static_html(self) -> str:
        """The mount of this widget for a built page, at its present settings."""
        return live_html(self.widget, dict(self.state), dict(self.params), self.fallback_table(), dict(self.data))

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict, dict]:
        data, metadata = super()._repr_mimebundle_(**kwargs)
        return {**data, "text/html": self.static_html()}, metadata
