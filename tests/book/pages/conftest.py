"""The built book behind a local web server, and a browser that can reach nothing else."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvlab.cli.doctor import find_browser

ROOT = Path(__file__).resolve().parents[3]
HTML = ROOT / "_build" / "html"
SKIPPED_PARTS = {"_static", "_sources", "_images", "_sphinx_design_static"}
DRAWN = """() => [...document.querySelectorAll('div.kv-plot')].every(b => b.querySelector('.main-svg, canvas'))
  && [...document.querySelectorAll('[data-kvlab-widget]')].every(w => w.dataset.mounted === 'true')"""


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


@pytest.fixture(scope="session")
def open_page(chromium: object, site: str) -> Callable[..., Visit]:
    """Opens a page of the book with `width`, `theme` and `javascript`; records errors and requests to other hosts."""

    def opened(path: str, *, width: int = 1200, theme: str = "light", javascript: bool = True) -> Visit:
        context = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, java_script_enabled=javascript
        )
        context.set_default_timeout(30_000)
        seen = Visit(context.new_page(), path, theme)

        def guard(route: object) -> None:
            if route.request.url.startswith((site, "blob:", "data:")):
                route.continue_()
            else:
                seen.foreign.append(route.request.url)
                route.abort()

        context.route("**/*", guard)
        seen.page.on("console", lambda m: seen.errors.append(m.text) if m.type == "error" else None)
        seen.page.on("pageerror", lambda e: seen.errors.append(str(e)))
        seen.page.on("response", lambda r: seen.missing.append(r.url) if r.status >= 400 else None)
        seen.page.goto(site + path, wait_until="load")
        if javascript:
            seen.page.evaluate("() => window.MathJax?.startup?.promise")
            seen.page.wait_for_function(DRAWN)
        return seen

    return opened


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, open_page: Callable[..., Visit]) -> Iterator[Visit]:
    """One page in one theme, open while the tests of it run: loading pages is what takes the time."""
    path, theme = request.param
    visit = open_page(path, theme=theme)
    yield visit
    visit.page.context.close()


@pytest.fixture
def visit(open_page: Callable[..., Visit]) -> Iterator[Callable[..., Visit]]:
    """Opens pages that are closed when the test ends."""
    visits = []

    def opened(path: str, **options: object) -> Visit:
        visits.append(open_page(path, **options))
        return visits[-1]

    yield opened
    for one in visits:
        one.page.context.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with `path` runs once per built page; one with `seen` once per page and theme."""
    pages = built_pages() or ["index.html"]
    if "seen" in metafunc.fixturenames:
        both = [(path, theme) for path in pages for theme in ("light", "dark")]
        metafunc.parametrize("seen", both, indirect=True, scope="module", ids=[f"{p}-{t}" for p, t in both])
    elif "path" in metafunc.fixturenames:
        metafunc.parametrize("path", pages)
