"""Takes the front page's picture of the explorer from the built book: book/assets/explorer.png and explorer-dark.png."""

from __future__ import annotations

import functools
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import sync_playwright

from kvlab.cli.doctor import find_browser

ROOT = Path(__file__).resolve().parents[1]
HTML = ROOT / "_build" / "html"
# the widget alone, as wide as in JupyterLab
ALONE = """.skip-link, #pst-skip-link, .bd-header-article, .bd-header,
.bd-sidebar-primary, .bd-sidebar-secondary { display: none !important }
.bd-article-container { max-width: 1060px !important; width: 1060px !important }
.kvx-quality, .kvx-results > * + .kvx-quality ~ * { display: none }"""


def page_with_explorer() -> str:
    """The first chapter page that holds the explorer."""
    return next(
        p.name for p in sorted((HTML / "chapters").glob("*.html")) if 'data-kvlab-widget="explorer"' in p.read_text()
    )


def main() -> None:
    """Writes both pictures."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(HTML))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/chapters/{page_with_explorer()}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"])
        for theme, name in (("light", "explorer.png"), ("dark", "explorer-dark.png")):
            page = browser.new_page(viewport={"width": 1200, "height": 1400}, color_scheme=theme)
            page.goto(address)
            page.wait_for_selector("[data-kvlab-widget=explorer][data-mounted=true]")
            page.add_style_tag(content=ALONE)
            page.wait_for_timeout(500)
            page.locator("section.kvx .kvx-grid").first.screenshot(path=ROOT / "book" / "assets" / name)
            page.close()
        browser.close()
    server.shutdown()


if __name__ == "__main__":
    main()
