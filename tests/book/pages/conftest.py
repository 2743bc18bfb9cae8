"""The built book behind a local web server, and a browser that can reach nothing else."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvlab.cli.doctor import find_browser

ROOT = Path(__file__).resolve().parents[3]
HTML = ROOT / "_build" / "html"
SKIPPED_PARTS = {"_static", "_sources", "_images", "_sphinx_design_static"}
DRAWN = """() => [...document.querySelectorAll('div.kv-plot')].every(b => b.querySelector('.main-svg, canvas'))
  && [...document.querySelectorAll('[data-kvlab-widget]')].every(w => w.dataset.mounted === 'true')"""

TWO_FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def built_pages() -> list[str]:
    """Paths of all pages of the built book, relative to its root."""
    found = (p.relative_to(HTML) for p in HTML.rglob("*.html"))
    return sorted(str(p) for p in found if not SKIPPED_PARTS & set(p.parts))


@dataclass
class Visit:
    """One open page and what went wrong on it."""

    page: object
    path: str
    theme: str
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line per request."""

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture(scope="session")
def site() -> Iterator[str]:
    """Address of the built book."""
    if not (HTML / "index.html").exists():
        pytest.fail("there is no built book: run `make build` first")
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(HTML)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="session")
def chromium() -> Iterator[object]:
    """A headless Chromium; its absence is a failure, never a skip."""
    from playwright.sync_api import sync_playwright

    path = find_browser()
    if path is None:
        pytest.fail("no Chromium: install it (Debian: apt-get install chromium) or set KVLAB_BROWSER")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


class Tab:
    """A browser tab that goes from page to page: loading is what takes the time, and scripts stay compiled in it.

    Args:
        chromium: the browser. site: address of the book.
        width, theme, javascript: how the pages are seen at first.
    """

    def __init__(
        self, chromium: object, site: str, *, width: int = 1200, theme: str = "light", javascript: bool = True
    ) -> None:
        self.site, self.width, self.javascript = site, width, javascript
        self.context = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, java_script_enabled=javascript,
            reduced_motion="reduce",
        )  # fmt: skip  # colours in the middle of a transition would be judged
        self.context.set_default_timeout(60_000)
        self.page, self.seen, self.theme = self.context.new_page(), None, theme
        self.context.route("**/*", self._guard)
        self.page.on("console", lambda m: self.seen.errors.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda e: self.seen.errors.append(str(e)))
        self.page.on("response", lambda r: self.seen.missing.append(r.url) if r.status >= 400 else None)

    def _guard(self, route: object) -> None:
        if route.request.url.startswith((self.site, "blob:", "data:")):
            route.continue_()
        else:
            self.seen.foreign.append(route.request.url)
            route.abort()

    def show(self, path: str, theme: str) -> Visit:
        """The page at `path` in `theme`, loaded unless it is what the tab shows; errors are counted from its load on."""
        if theme != self.theme:
            self.page.emulate_media(color_scheme=theme)
            self.theme = theme
        if self.seen is None or self.seen.path != path:
            self.seen = Visit(self.page, path, theme)
            self.page.set_viewport_size({"width": self.width, "height": 900})
            self.page.goto(self.site + path, wait_until="load")
            if self.javascript:
                self.page.evaluate("() => window.MathJax?.startup?.promise")
                self.page.wait_for_function(DRAWN)
            return self.seen
        self.seen = replace(self.seen, theme=theme)
        self.page.set_viewport_size({"width": self.width, "height": 900})
        self.page.wait_for_function("t => document.documentElement.dataset.theme === t", arg=theme)
        self.page.evaluate(TWO_FRAMES)
        return self.seen


@pytest.fixture(scope="session")
def tab(chromium: object, site: str) -> Iterator[Tab]:
    """The tab that all pages are loaded in, one after another."""
    opened = Tab(chromium, site)
    yield opened
    opened.context.close()


@pytest.fixture(scope="session")
def plain_tab(chromium: object, site: str) -> Iterator[Tab]:
    """The same without JavaScript."""
    opened = Tab(chromium, site, javascript=False)
    yield opened
    opened.context.close()


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tab: Tab) -> Visit:
    """One page in one theme; the second theme is switched to on the loaded page, as the reader's system does it."""
    path, theme = request.param
    return tab.show(path, theme)


@pytest.fixture
def visit(chromium: object, site: str) -> Iterator[Callable[..., Visit]]:
    """Opens pages in tabs of their own, which are closed when the test ends."""
    tabs = []

    def opened(path: str, *, theme: str = "light", **options: object) -> Visit:
        tabs.append(Tab(chromium, site, theme=theme, **options))
        return tabs[-1].show(path, theme)

    yield opened
    for one in tabs:
        one.context.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with `path` runs once per built page; one with `seen` once per page and theme."""
    pages = built_pages() or ["index.html"]
    if "seen" in metafunc.fixturenames:
        both = [(path, theme) for path in pages for theme in ("light", "dark")]
        metafunc.parametrize("seen", both, indirect=True, scope="module", ids=[f"{p}-{t}" for p, t in both])
    elif "path" in metafunc.fixturenames:
        metafunc.parametrize("path", pages)
