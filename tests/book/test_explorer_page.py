"""The explorer in a published page: real browser, no network, the same numbers as `kvlab plan --json`."""

from __future__ import annotations

import functools
import http.server
import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("anywidget", reason="anywidget is not installed")

from kvlab.cli.doctor import find_browser  # noqa: E402
from kvlab.widgets import Explorer  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import assets  # noqa: E402

pytestmark = [
    pytest.mark.book,
    pytest.mark.skipif(not (assets.MODULES / "pyodide").is_dir(), reason="pyodide is not installed (make build)"),
    pytest.mark.skipif(not find_browser(), reason="no Chromium here"),
]

PAGE = """<!doctype html><html lang="en" data-theme="light" data-content_root="../"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>Explorer</title>
<style>body {{ font-family: sans-serif; margin: 8px; background: #fff; color: #111 }}
html[data-theme=dark] body {{ background: #121212; color: #eee }}</style></head>
<body><main class="bd-content"><h1>Explorer</h1>
<div class="cell_output"><div class="text_html">{mount}</div></div></main>
</body></html>"""

CHANGES = (
    ("model", "gemma-3-27b"),
    ("model", "deepseek-v3"),
    ("model", "llama-3.1-70b"),
    ("kv_dtype", "fp8_e4m3"),
    ("weight_dtype", "int4_g32"),
    ("context", 2**17),
    ("batch", 8),
    ("tp", "4"),
    ("gpu", "h200"),
    ("policy", "paged"),
    ("model", "own"),
    ("layers", "48"),
    ("query_heads", "64"),
    ("head_dim", "96"),
    ("attention", "mha"),
    ("attention", "mqa"),
    ("attention", "gqa"),
    ("kv_heads", "16"),
    ("attention", "sliding"),
    ("window", "8192"),
    ("attention", "hybrid"),
    ("full_every", "6"),
    ("attention", "mla"),
    ("latent_dim", "384"),
    ("rope_dim", "32"),
    ("attention", "recurrent"),
    ("full_every", "8"),
    ("state_dim", "64"),
    ("attention", "compressed"),
    ("window", "256"),
    ("ratio", "4"),
)
"""Every control at least once, in an order in which each has an effect."""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_args: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a page in a sub-folder of a served site that has what a built book has."""
    root = tmp_path_factory.mktemp("site") / "deep" / "book"
    (root / "chapters").mkdir(parents=True)
    (root / "chapters" / "page.html").write_text(PAGE.format(mount=Explorer().static_html()), encoding="utf-8")
    for step in (assets.copy_pyodide, assets.zip_kvlab, assets.copy_widgets):
        step(root / "_static")
    handler = functools.partial(_Quiet, directory=str(root.parents[1]))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/deep/book/chapters/page.html"
    server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as play:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        running = play.chromium.launch(executable_path=find_browser(), args=flags)
        yield running
        running.close()


class Page:
    """An open page with everything it asked for and complained about."""

    def __init__(self, browser: playwright.Browser, url: str, **context: object) -> None:
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

    def mounted(self) -> Page:
        self.page.wait_for_selector("[data-mounted=true]")
        return self

    def settle(self) -> None:
        """Waits until the widget shows the answer to its settings."""
        self.page.wait_for_function("document.querySelector('[data-busy]').dataset.busy === 'false'", timeout=60_000)

    def change(self, name: str, value: object) -> None:
        control = self.page.locator(f"form.kvx-controls [name={name}]")
        assert control.is_visible(), name
        if control.get_attribute("type") == "range":
            steps = int(value).bit_length() - 1  # type: ignore[call-overload]
            control.evaluate("(e, v) => { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})) }", steps)
        elif control.evaluate("e => e.tagName") == "SELECT":
            control.select_option(str(value))
        else:
            control.fill(str(value))
        self.settle()

    def figure(self, name: str) -> str:
        return self.page.locator(f"[data-figure={name}] dd").first.inner_text()

    def part(self, name: str) -> str:
        return self.page.locator(f"[data-part={name}] b").inner_text()

    def command(self) -> str:
        return self.page.locator(".kvx-command").inner_text()


DRIVER = """import contextlib, io, json, sys
from kvlab.cli import main
for words in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*words, "--json"]) == 0, words
    print(json.dumps(json.loads(out.getvalue())))
"""


def plans(commands: list[str]) -> list[dict]:
    """What each shown command prints with --json, from one process of their own."""
    words = [shlex.split(command) for command in commands]
    assert all(w[:2] == ["kvlab", "plan"] for w in words)
    asked = json.dumps([w[1:] for w in words])
    run = subprocess.run(
        [sys.executable, "-c", DRIVER], input=asked, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def gib(n: float) -> str:
    return f"{n / 2**30:,.2f} GiB"


def shown(page: Page) -> dict[str, str]:
    """The figures the page shows, as text."""
    drawn = {p: page.page.locator(f".kvx-part-{p} title").all_text_contents() for p in ("weights", "cache")}
    return {
        "kv_bytes": page.page.locator("[data-figure=kv_bytes] dd").nth(1).inner_text(),
        "max_concurrent": page.figure("max_concurrent"),
        "tokens_per_s": page.figure("tokens_per_s"),
        "weights": page.part("weights"),
        "cache": page.part("cache"),
        "drawn": drawn,
        "capacity": page.page.locator(".kvx-bar").text_content(),
    }


def assert_same_figures(found: dict, plan: dict) -> None:
    """Compares what a page showed with a plan, at the precision it shows."""
    assert found["kv_bytes"].startswith(f"{plan['kv_bytes']:,} bytes")
    assert found["max_concurrent"] == f"{plan['max_concurrent']:,}"
    state = plan["kv_state_bytes"] * plan["batch"] // plan["tp"]
    weights, cache = gib(plan["memory"]["weights_bytes"]), gib(plan["kv_bytes_per_gpu"] * plan["batch"] - state)
    assert found["weights"] == weights and found["cache"] == cache
    assert found["drawn"] == {"weights": [f"Weights: {weights}"], "cache": [f"KV cache: {cache}"]}
    assert f"capacity {gib(plan['hardware']['memory_bytes'])}" in found["capacity"]
    speed = plan["timing"]["decode"]["tokens_per_s"]
    assert float(found["tokens_per_s"].replace(",", "")) == pytest.approx(speed, rel=6e-3)


def test_values_of_the_build_are_shown_and_nothing_is_fetched_until_a_control_moves(site: str, browser) -> None:
    page = Page(browser, site).mounted()
    assert_same_figures(shown(page), plans([page.command()])[0])
    assert "Computed when the book was built" in page.page.locator(".kvlab-live-status").inner_text()
    assert not [url for url in page.requests if "pyodide" in url or url.endswith(".zip")]
    page.change("batch", 4)
    assert [url for url in page.requests if url.endswith("pyodide.asm.wasm")]
    assert "Computed in this page by kvlab" in page.page.locator(".kvlab-live-status").inner_text()
    assert all(url.startswith("http://127.0.0.1") for url in page.requests)
    assert not page.errors
    page.context.close()


def test_every_control_gives_the_numbers_of_the_command_line(site: str, browser) -> None:
    page = Page(browser, site).mounted()
    names = {n for n in page.page.locator("form.kvx-controls [name]").evaluate_all("e => e.map(x => x.name)") if n}
    assert names == {name for name, _ in CHANGES}
    commands, figures = [], []
    for name, value in CHANGES:
        before = page.command(), page.page.locator(".kvx-results").first.inner_text()
        page.change(name, value)
        assert page.page.locator(".kvx-error").inner_text() == ""
        after = page.command(), page.page.locator(".kvx-results").first.inner_text()
        assert after != before, f"{name} = {value} changed nothing"
        commands.append(after[0])
        figures.append(shown(page))
    for change, found, plan in zip(CHANGES, figures, plans(commands), strict=True):
        try:
            assert_same_figures(found, plan)
        except AssertionError as error:
            raise AssertionError(f"after {change}") from error
    assert not page.errors
    page.context.close()


def test_a_setting_that_cannot_be_is_said_and_the_last_figures_stay(site: str, browser) -> None:
    page = Page(browser, site).mounted()
    page.change("model", "own")
    before = page.command()
    page.change("kv_heads", "7")
    assert "kv_heads 7: must divide the 32 query heads" in page.page.locator(".kvx-error").inner_text()
    assert page.command() == before
    page.change("kv_heads", "4")
    assert page.page.locator(".kvx-error").inner_text() == ""
    page.context.close()


def test_python_can_be_stopped_and_starts_again(site: str, browser) -> None:
    page = Page(browser, site).mounted()
    page.page.locator("[name=gpu]").select_option("b200")
    page.page.get_by_role("button", name="Cancel").click()
    page.settle()
    assert "Python is stopped" in page.page.locator(".kvlab-live-status").inner_text()
    assert "stopped" in page.page.locator(".kvx-error").inner_text()
    page.change("gpu", "h200")
    assert "h200" in page.command() and page.page.locator(".kvx-error").inner_text() == ""
    page.context.close()


def test_the_keyboard_alone_reaches_and_moves_every_kind_of_control(site: str, browser) -> None:
    page = Page(browser, site).mounted()
    page.page.locator("[name=model]").focus()
    order = []
    for _ in range(12):
        order.append(page.page.evaluate("document.activeElement.name || document.activeElement.className"))
        page.page.keyboard.press("Tab")
    expected = ["model", "weight_dtype", "kv_dtype", "context", "batch", "gpu", "tp", "policy", "kvx-command"]
    assert order[: len(expected)] == expected
    page.page.locator("[name=context]").focus()
    page.page.keyboard.press("ArrowRight")
    page.settle()
    assert "--context 16384" in page.command()
    page.page.locator("[name=kv_dtype]").focus()
    page.page.keyboard.press("i")
    page.settle()
    assert "--kv-dtype int8" in page.command()
    page.context.close()


def contrast(page: playwright.Page, selector: str) -> float:
    """WCAG contrast of the text of `selector` against the first opaque background behind it."""
    return page.locator(selector).first.evaluate("""element => {
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
    }""")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_in_both_themes(site: str, browser, theme: str) -> None:
    page = Page(browser, site).mounted()
    page.page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
    for selector in (".kvx-summary", ".kvx label > span", ".kvx legend", ".kvx select", ".kvx-cards dt", ".kvx-note",
                     ".kvx-command", ".kvx-scale span", ".kvx-keys b", ".kvx output"):  # fmt: skip
        assert contrast(page.page, selector) >= 4.5, f"{selector} in {theme}"
    page.context.close()


def test_a_phone_shows_it_all_without_scrolling_sideways(site: str, browser) -> None:
    page = Page(browser, site, viewport={"width": 390, "height": 800}).mounted()
    page.change("model", "own")
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 390
    for box in page.page.locator(".kvx :is(select, input, button, .kvx-bar)").all():
        if box.is_visible():
            found = box.bounding_box()
            assert found["x"] >= 0 and found["x"] + found["width"] <= 390 and found["height"] >= 15
    page.context.close()


def test_without_javascript_a_table_of_at_least_three_settings_remains(site: str, browser) -> None:
    page = Page(browser, site, java_script_enabled=False)
    rows = page.page.locator(".kvlab-live-fallback tbody tr")
    assert rows.count() >= 3 and rows.first.is_visible()
    assert re.search(r"llama-3\.1-8b.*GiB", rows.first.inner_text().replace("\n", " "))
    page.context.close()


def test_opened_as_a_file_it_shows_the_built_values_and_says_how_to_serve(browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(PAGE.format(mount=Explorer().static_html()), encoding="utf-8")
    page = Page(browser, path.as_uri())
    assert "serve" in page.page.locator(".kvlab-live-hint").inner_text()
    assert page.page.locator(".kvlab-live-fallback tbody tr").count() >= 3
    assert not page.errors
    page.context.close()
