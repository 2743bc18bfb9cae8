"""The step-through in a published page: every step both ways as Python has it, before and after a reader's change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("anywidget", reason="anywidget is not installed")

from live_page import LivePage, assets, chromium, served

from kvlab.cli.doctor import find_browser
from kvlab.schedule.story import STORIES, story_state
from kvlab.widgets import StepThrough

pytestmark = [
    pytest.mark.book,
    pytest.mark.skipif(not (assets.MODULES / "pyodide").is_dir(), reason="pyodide is not installed (make build)"),
    pytest.mark.skipif(not find_browser(), reason="no Chromium here"),
]

SHOWN = """() => ({
  title: document.querySelector('.kvs-title').textContent,
  events: [...document.querySelectorAll('.kvs-events li[data-kind]')].map(e => e.textContent),
  queues: [...document.querySelectorAll('.kvs-queue')].slice(0, 2).map(q => [...q.querySelectorAll('li b')].map(e => e.textContent)),
  tables: [...document.querySelectorAll('[data-table]')].map(e => e.dataset.table),
  idle: [...document.querySelectorAll('[data-idle]')].map(e => e.dataset.idle),
  index: [...document.querySelectorAll('.kvs-prefix code')].map(e => e.textContent),
  free: [...document.querySelectorAll('[data-free]')].map(e => e.dataset.free),
  held: [...document.querySelectorAll('.kvs-pool')].map(p => [...p.children].map(e => e.dataset.held)),
})"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("site"), StepThrough().static_html()) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with chromium() as running:
        yield running


def labels(entries: list[dict]) -> Iterator[str]:
    """Labels of a tree, each before those below it."""
    for entry in entries:
        yield entry["label"]
        yield from labels(entry["children"])


def expected(state: dict, shot: dict) -> dict:
    """What the page must show of a snapshot, from Python's data."""
    held = [[""] * count for count in state["pools"]]
    for name, tables in shot["tables"].items():
        for g, table in enumerate(tables):
            for entry, page in enumerate(table):
                if page:
                    cells = held[state["pool_of"][g]]
                    cells[page - 1] = f"{cells[page - 1]} {name}:{entry}".strip()
    return {
        "events": [text for _, _, text in shot["events"]],
        "queues": [shot["waiting"], shot["running"]],
        "tables": [f"{n}:{g}:{','.join(map(str, t))}" for n, ts in shot["tables"].items() for g, t in enumerate(ts)],
        "free": [",".join(map(str, free)) for free in shot["free"]],
        "idle": [",".join(map(str, idle)) for idle in shot.get("idle", [])],
        "index": list(labels(shot["prefix"]["entries"])) if "prefix" in shot else [],
        "held": held,
    }


def assert_shows(page: LivePage, state: dict, index: int) -> None:
    found, shot = page.page.evaluate(SHOWN), state["snapshots"][index]
    title = found.pop("title")
    assert title.startswith("Before" if shot["phase"] == "start" else f"Step {shot['step']}:"), title
    assert found == expected(state, shot), f"snapshot {index}"


def test_every_step_of_every_story_is_shown_as_python_has_it_and_the_way_back_is_exact(site, browser) -> None:
    page = LivePage(browser, site).mounted()
    state = story_state({})
    last = len(state["snapshots"]) - 1
    for index in range(last):
        assert_shows(page, state, index)
        page.page.locator(".kvs-next").click()
    assert page.page.locator(".kvs-next").is_disabled()
    for index in range(last, -1, -1):
        assert_shows(page, state, index)
        if index:
            page.page.locator(".kvs-back").click()
    assert not [url for url in page.requests if "pyodide" in url]

    page.page.locator(".kvs-edit summary").click()
    for name, params in STORIES.items():
        page.page.locator("[name=story]").select_option(name)
        page.settle()
        assert page.page.locator(".kvs-error").first.inner_text() == ""
        state = story_state(params)
        # the slider moves without a walk: every snapshot again, now from the page's own Python
        for index in range(len(state["snapshots"])):
            page.page.locator(".kvs-walk input").evaluate(
                "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})) }", index
            )
            assert_shows(page, state, index)
    assert "Computed in this page by kvlab" in page.page.locator(".kvlab-live-status").inner_text()

    page.page.locator("[name=pages]").fill("3")
    page.settle()
    page.page.locator(".kvs-first").click()
    page.page.locator(".kvs-next").click()
    assert "is refused: request can never fit" in page.page.locator(".kvs-events").inner_text()
    page.page.locator("[name=pages]").fill("0")
    page.settle()
    assert "pages 0: must be a whole number from 1 to 200" in page.page.locator(".kvs-error").first.inner_text()
    assert all(url.startswith("http://127.0.0.1") for url in page.requests) and not page.errors
    page.context.close()


def test_keyboard_themes_phone_and_a_page_without_javascript(site, browser) -> None:
    page = LivePage(browser, site, viewport={"width": 390, "height": 800}).mounted()
    page.page.locator(".kvs-walk input").focus()
    for _ in range(3):
        page.page.keyboard.press("ArrowRight")
    state = story_state({})
    assert_shows(page, state, 3)
    page.page.keyboard.press("End")
    assert_shows(page, state, len(state["snapshots"]) - 1)
    page.page.keyboard.press("Home")
    page.page.keyboard.press("ArrowRight")
    page.page.locator(".kvs-edit summary").focus()
    page.page.keyboard.press("Enter")
    assert page.page.locator("[name=pages]").is_visible()
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 390
    for box in page.page.locator(".kvs :is(select, button, .kvs-page, .kvs-walk input)").all():
        found = box.bounding_box()
        assert found["x"] >= 0 and found["x"] + found["width"] <= 390 and found["height"] >= 15
    for theme in ("light", "dark"):
        page.page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
        for selector in (".kvs-title", ".kvs-events li", ".kvs-chip", ".kvs-number", ".kvs-free .kvs-owner", ".kvs-list",
                         ".kvs-queue > span", ".kvs-table li", ".kvs caption", ".kvs label > span", ".kvs select",
                         ".kvs-first", ".kvs-add"):  # fmt: skip
            assert page.contrast(selector) >= 4.5, f"{selector} in {theme}"
    page.context.close()

    bare = LivePage(browser, site, java_script_enabled=False)
    rows = bare.page.locator(".kvlab-live-fallback tbody tr")
    assert rows.count() == len(state["snapshots"]) and rows.first.is_visible()
    assert "A: [1, 2, 3]; B: [4, 5]" in rows.nth(1).inner_text()
    bare.context.close()
