"""The trace simulator in a published page: a pasted trace gives Python's figures, with progress, and can be cancelled."""

from __future__ import annotations

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("anywidget", reason="anywidget is not installed")

from live_page import LivePage, assets, chromium, served

from kvlab.cli.doctor import find_browser
from kvlab.simulate.page import example, simulate_state
from kvlab.widgets import TraceSimulator

pytestmark = [
    pytest.mark.book,
    pytest.mark.skipif(not (assets.MODULES / "pyodide").is_dir(), reason="pyodide is not installed (make build)"),
    pytest.mark.skipif(not find_browser(), reason="no Chromium here"),
]
SHOWN = """() => ({title: document.querySelector('.kvs-title').textContent,
  cards: [...document.querySelectorAll('[data-figure]')].map(e => [e.dataset.figure, e.querySelector('dd').textContent]),
  rows: [...document.querySelectorAll('.kvs-results tbody tr')].map(r => [...r.children].map(e => e.textContent))})"""


def expected(state: dict) -> dict:
    return {"title": state["title"], "cards": [c[:2] for c in state["cards"]], "rows": state["rows"]}


def test_a_pasted_trace_gives_pythons_figures_and_a_long_one_can_be_cancelled(tmp_path) -> None:
    with served(tmp_path, TraceSimulator().static_html()) as site, chromium() as browser:
        page = LivePage(browser, site, viewport={"width": 390, "height": 800}).mounted()
        assert page.page.evaluate(SHOWN) == expected(simulate_state({}))
        assert page.page.evaluate("document.documentElement.scrollWidth") <= 390

        short = {"trace": example(8, seed=1), "model": "llama-3.1-8b", "tp": 1, "gpu": "h100-sxm", "prefix": "radix"}
        for name, value in short.items():
            control = page.page.locator(f"[name={name}]")
            tag = control.evaluate("e => e.tagName")
            control.select_option(value) if tag == "SELECT" else control.fill(str(value))
        page.page.locator(".kvs-start").click()
        page.settle()
        assert page.page.evaluate(SHOWN) == expected(simulate_state(short))

        page.page.locator("[name=trace]").fill("hello")
        page.page.locator(".kvs-start").click()
        page.settle()
        assert "the trace, row 1" in page.page.locator(".kvs-error").inner_text()

        rows = "\n".join(f"{100 + i},{20 + i % 7}" for i in range(1500))
        trace = f"num_prefill_tokens,num_decode_tokens\n{rows}"
        page.page.locator("[name=trace]").evaluate("(e, text) => { e.value = text; }", trace)
        page.page.locator("[name=rows]").fill("1500")
        page.page.locator("[name=rate]").fill("20")
        page.page.locator(".kvs-start").click()
        page.page.wait_for_function(
            "document.querySelector('.kvs-row [role=status]').textContent.includes('of 1500 requests')"
        )
        page.page.locator(".kvs-cancel").click()
        page.settle()
        assert "stopped" in page.page.locator(".kvs-error").inner_text()
        for theme in ("light", "dark"):
            page.page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
            for selector in (".kvs-title", ".kvs-cards dt", ".kvs-note", ".kvs-notes li", ".kvs textarea", ".kvs-start",
                             ".kvs-error", ".kvs caption", ".kvs-results td"):  # fmt: skip
                assert page.contrast(selector) >= 4.5, f"{selector} in {theme}"
        assert not page.errors
        page.context.close()
