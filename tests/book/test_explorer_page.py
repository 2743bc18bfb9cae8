"""The explorer in a published page: real browser, no network, the same numbers as `kvlab plan --json`."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("anywidget", reason="anywidget is not installed")

from live_page import PAGE, LivePage, assets, chromium, served

from kvlab.cli.doctor import find_browser
from kvlab.widgets import Explorer

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.book,
    pytest.mark.skipif(not (assets.MODULES / "pyodide").is_dir(), reason="pyodide is not installed (make build)"),
    pytest.mark.skipif(not find_browser(), reason="no Chromium here"),
]

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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("site"), Explorer().static_html()) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with chromium() as running:
        yield running


class Page(LivePage):
    """A page with the explorer."""

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


SHOWN = """() => { const text = s => document.querySelector(s)?.innerText, all = s => [...document.querySelectorAll(s)];
  return {kv_bytes: all('[data-figure=kv_bytes] dd')[1].innerText, max_concurrent: text('[data-figure=max_concurrent] dd'),
    tokens_per_s: text('[data-figure=tokens_per_s] dd'), weights: text('[data-part=weights] b'), cache: text('[data-part=cache] b'),
    drawn: Object.fromEntries(['weights', 'cache'].map(p => [p, all(`.kvx-part-${p} title`).map(t => t.textContent)])),
    capacity: document.querySelector('.kvx-bar').textContent, command: text('.kvx-command'), error: text('.kvx-error'),
    results: text('.kvx-results')}; }"""


def shown(page: Page) -> dict:
    """What the page shows, as text."""
    return page.page.evaluate(SHOWN)


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


@pytest.fixture(scope="module")
def page(site: str, browser) -> Iterator[Page]:
    """One page for all that need Python in it, since that takes its time to start; each test says what it starts from."""
    opened = Page(browser, site).mounted()
    yield opened
    assert all(url.startswith("http://127.0.0.1") for url in opened.requests)
    assert not opened.errors
    opened.context.close()


def test_values_of_the_build_are_shown_and_nothing_is_fetched_until_a_control_moves(page: Page) -> None:
    assert_same_figures(shown(page), plans([page.command()])[0])
    assert "Computed when the book was built" in page.page.locator(".kvlab-live-status").inner_text()
    gpu = Explorer().data["gpu"]
    assert page.page.locator("[data-part=gpu]").inner_text() == gpu["models"].get(
        Explorer().params["model"], gpu["text"]
    )
    assert not [url for url in page.requests if "pyodide" in url or url.endswith(".zip")]
    page.page.locator("[name=gpu]").select_option("b200")
    page.page.get_by_role("button", name="Cancel").click()  # while Python starts
    page.settle()
    assert "Python is stopped" in page.page.locator(".kvlab-live-status").inner_text()
    assert "stopped" in shown(page)["error"]
    page.change("gpu", "h200")  # starts it again
    assert "h200" in page.command() and shown(page)["error"] == ""
    assert "on a GPU" in shown(page)["results"] or "Measured on" in shown(page)["results"]
    assert [url for url in page.requests if url.endswith("pyodide.asm.wasm")]
    assert "Computed in this page by kvlab" in page.page.locator(".kvlab-live-status").inner_text()


def test_every_control_gives_the_numbers_of_the_command_line(page: Page) -> None:
    names = {n for n in page.page.locator("form.kvx-controls [name]").evaluate_all("e => e.map(x => x.name)") if n}
    assert names == {name for name, _ in CHANGES}
    page.change("gpu", "h100-sxm")
    before, figures = shown(page), []
    for name, value in CHANGES:
        page.change(name, value)
        after = shown(page)
        assert after["error"] == ""
        assert (after["command"], after["results"]) != (before["command"], before["results"]), f"{name} = {value}"
        figures.append(before := after)
    computed = plans([found["command"] for found in figures])
    for change, found, plan in zip(CHANGES, figures, computed, strict=True):
        try:
            assert_same_figures(found, plan)
        except AssertionError as error:
            raise AssertionError(f"after {change}") from error


def test_a_setting_that_cannot_be_is_said_and_the_last_figures_stay(page: Page) -> None:
    for name, value in (("model", "own"), ("attention", "gqa"), ("query_heads", "32"), ("kv_heads", "8")):
        page.change(name, value)
    before = page.command()
    page.change("kv_heads", "7")
    assert "kv_heads 7: must divide the 32 query heads" in shown(page)["error"]
    assert page.command() == before
    page.change("kv_heads", "4")
    assert shown(page)["error"] == ""


def test_the_keyboard_alone_reaches_and_moves_every_kind_of_control(page: Page) -> None:
    for name, value in (("model", "llama-3.1-8b"), ("context", 8192), ("kv_dtype", "bf16")):
        page.change(name, value)
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


def test_text_can_be_read_in_both_themes(page: Page) -> None:
    page.change("model", "own")
    for theme in ("light", "dark"):
        page.page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
        for selector in (".kvx-summary", ".kvx label > span", ".kvx legend", ".kvx select", ".kvx-cards dt", ".kvx-note",
                         ".kvx-command", ".kvx-scale span", ".kvx-keys b", ".kvx output"):  # fmt: skip
            assert page.contrast(selector) >= 4.5, f"{selector} in {theme}"


def test_a_phone_shows_it_all_without_scrolling_sideways(page: Page) -> None:
    page.page.set_viewport_size({"width": 390, "height": 800})
    page.change("model", "own")
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 390
    for box in page.page.locator(".kvx :is(select, input, button, .kvx-bar)").all():
        if box.is_visible():
            found = box.bounding_box()
            assert found["x"] >= 0 and found["x"] + found["width"] <= 390 and found["height"] >= 15


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
