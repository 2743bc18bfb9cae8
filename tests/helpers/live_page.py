"""A published page with one live widget, served from a sub-folder as a built book has it, and a browser on it."""

from __future__ import annotations

import functools
import http.server
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvlab.cli.doctor import find_browser

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import assets

PAGE = """<!doctype html><html lang="en" data-theme="light" data-content_root="../"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>Widget</title>
<style>body {{ font-family: sans-serif; margin: 8px; background: #fff; color: #111 }}
html[data-theme=dark] body {{ background: #121212; color: #eee }}</style></head>
<body><main class="bd-content"><h1>Widget</h1>
<div class="cell_output"><div class="text_html">{mount}</div></div></main>
</body></html>"""

CONTRAST = """element => {
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const style = getComputedStyle(element);
    const text = light(parse(element.namespaceURI.endsWith("svg") ? style.fill : style.color));
    let at = element, back = [255, 255, 255];
    for (; at; at = at.parentElement) {
        const c = parse(getComputedStyle(at).backgroundColor);
        if (c.length < 4 || c[3] > 0) { back = c; break; }
    }
    const b = light(back);
    return (Math.max(text, b) + 0.05) / (Math.min(text, b) + 0.05);
}"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_args: object) -> None:
        """Nothing."""


@contextmanager
def served(folder: Path, mount: str) -> Iterator[str]:
    """URL of a page with `mount` in a sub-folder of a served site that has what a built book has."""
    root = folder / "deep" / "book"
    (root / "chapters").mkdir(parents=True)
    (root / "chapters" / "page.html").write_text(PAGE.format(mount=mount), encoding="utf-8")
    for step in (assets.copy_pyodide, assets.zip_kvlab, assets.copy_widgets):
        step(root / "_static")
    handler = functools.partial(_Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/deep/book/chapters/page.html"
    server.shutdown()


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        running = play.chromium.launch(executable_path=find_browser(), args=flags)
        yield running
        running.close()


class LivePage:
    """An open page with everything it asked for and complained about."""

    def __init__(self, browser: Any, url: str, **context: object) -> None:
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.context.route(
            lambda u: not u.startswith(("http://127.0.0.1", "file:", "blob:", "data:")), lambda r: r.abort()
        )
        self.page.goto(url)

    def mounted(self):
        """The page, once its widget is there."""
        self.page.wait_for_selector("[data-mounted=true]")
        return self

    def settle(self) -> None:
        """Waits until the widget shows the answer to its settings; Python starts in seconds, on a busy machine in minutes."""
        self.page.wait_for_function("document.querySelector('[data-busy]').dataset.busy === 'false'", timeout=180_000)

    def contrast(self, selector: str) -> float:
        """WCAG contrast of the text of `selector` against the first opaque background behind it."""
        return self.page.locator(selector).first.evaluate(CONTRAST)
