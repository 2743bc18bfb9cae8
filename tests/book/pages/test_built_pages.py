"""Every built page in a real browser with the network blocked: it draws, it can be read, it asks nobody else."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HTML = ROOT / "_build" / "html"

pytestmark = pytest.mark.book

FIGURES = "div.kv-plot"
BOXES = """() => [...document.querySelectorAll('div.kv-plot')].map(box => {
  const svg = box.querySelector('.main-svg, canvas'), r = (svg ?? box).getBoundingClientRect();
  return {name: box.id, drawn: !!svg, width: r.width, height: r.height}; })"""
UNTYPESET = """() => [...document.querySelectorAll('.bd-article .math')]
  .filter(m => !m.querySelector('mjx-container, mjx-math')).map(m => m.textContent.slice(0, 80))"""
# a table of a sentence's words would be no picture: only what carries meaning needs a text
SILENT_PICTURES = """() => [...document.querySelectorAll('.bd-article img, .bd-article [role=img], .bd-article figure')]
  .filter(e => { const t = e.getAttribute('alt') ?? e.getAttribute('aria-label') ??
      e.querySelector('[aria-label], img[alt], figcaption')?.textContent ??
      e.querySelector('[aria-label]')?.getAttribute('aria-label') ?? '';
    return t.trim().length < 10 || /^_images|\\.(png|svg)$/.test(t); }).map(e => e.outerHTML.slice(0, 120))"""
PROSE = """() => { const copy = document.querySelector('main').cloneNode(true);
  copy.querySelectorAll('pre, code, script').forEach(e => e.remove()); return copy.textContent; }"""
CONTRAST_OF_FIGURES = """() => { const lum = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number)
      .map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b; };
  const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$|transparent/.test(c)) return c; } return 'rgb(255, 255, 255)'; };
  return [...document.querySelectorAll('.kv-plot .xtick text, .kv-plot .ytick text, .kv-plot .g-xtitle text, .kv-plot .g-ytitle text')]
    .map(t => { const a = lum(getComputedStyle(t).fill), b = lum(ground(t.closest('.kv-plot')));
      return {text: t.textContent, ratio: (Math.max(a, b) + .05) / (Math.min(a, b) + .05)}; })
    .filter(t => t.ratio < 4.5); }"""
# what axe's contrast rule looks at, without its minutes: every visible text, one finding per style. Colours are composited
# over the grounds behind them; a ground that is an image is left to axe.
FAINT_TEXTS = """() => { const parse = c => { const [r, g, b, a = 1] = c.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a)];
  const lum = c => c.slice(0, 3).map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const grounds = new Map();
  const ground = e => { if (!e) return [255, 255, 255]; if (grounds.has(e)) return grounds.get(e);
    const s = getComputedStyle(e), c = parse(s.backgroundColor);
    const found = s.backgroundImage !== 'none' ? null : c[3] === 1 ? c : (b => b && over(c, b))(ground(e.parentElement));
    grounds.set(e, found); return found; };
  const seen = new Map();
  for (const e of document.body.querySelectorAll('*')) {
    if (e.closest('.main-svg, script, style, noscript, :disabled')) continue;
    // a single sign is taken for a drawing, by axe as well
    if ([...e.childNodes].map(n => n.nodeType === 3 ? n.data.trim() : '').join('').length < 2) continue;
    if (!e.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    const s = getComputedStyle(e), box = e.getBoundingClientRect(), back = ground(e);
    if (!back || box.width < 2 || box.height < 2 || s.clipPath.includes('50%')) continue;
    let opacity = 1; for (let at = e; at; at = at.parentElement) opacity *= +getComputedStyle(at).opacity;
    const color = parse(s.color), size = parseFloat(s.fontSize);
    const a = lum(over([...color.slice(0, 3), color[3] * opacity], back)), b = lum(back);
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < (size >= 24 || (size >= 18.66 && +s.fontWeight >= 700) ? 3 : 4.5))
      seen.set(`${e.tagName}.${e.className} ${s.color} on ${back}`, `${ratio.toFixed(2)}: ${e.textContent.trim().slice(0, 60)}`); }
  return [...seen]; }"""
# axe measures contrast in seconds a page; one element of each style, with what is inside it, stands for all of that style
MARK_STYLES = """() => { const seen = new Set();
  for (const e of document.querySelectorAll('[data-kv-style]')) e.removeAttribute('data-kv-style');
  for (const e of document.body.querySelectorAll('*')) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) || e.closest('.main-svg, script, style, noscript')) continue;
    if (!e.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    const s = getComputedStyle(e); let back = '';
    for (let at = e; at; at = at.parentElement) {
      const c = getComputedStyle(at), ground = c.backgroundColor;
      if (c.opacity < 1) back += c.opacity;
      if (!/, 0\\)$|transparent/.test(ground)) { back += ground; if (!/, 0\\.\\d+\\)$/.test(ground)) break; } }
    const style = [e.tagName, e.className, s.color, s.fontSize, s.fontWeight, back].join('|');
    if (!seen.has(style)) { seen.add(style); e.setAttribute('data-kv-style', ''); } }
  return seen.size; }"""
# axe looks for everything else on every page, and for contrast on one page of each kind
CONTRAST_BY_AXE = (
    "index.html",
    "chapters/03_history.html",
    "chapters/06_worked_examples.html",
    "chapters/09_paging.html",
)


def test_page_draws_everything_and_asks_no_other_host(seen) -> None:
    assert seen.errors == [] and seen.foreign == [] and seen.missing == []
    assert seen.page.evaluate("document.documentElement.dataset.theme") == seen.theme
    undrawn = [f for f in seen.page.evaluate(BOXES) if not f["drawn"] or f["width"] <= 50 or f["height"] <= 50]
    assert undrawn == []
    assert seen.page.evaluate(UNTYPESET) == []
    assert seen.page.evaluate(CONTRAST_OF_FIGURES) == []


def test_every_picture_says_what_it_shows(seen) -> None:
    assert seen.page.evaluate(SILENT_PICTURES) == []


def test_no_markup_is_left_raw(seen) -> None:
    assert re.findall(r":::|\{[a-z-]+\}`|```", seen.page.evaluate(PROSE)) == []


def serious(page: object, context: dict, options: dict) -> list[tuple[str, str]]:
    """Rule and element of each serious fault that axe finds."""
    from axe_playwright_python.sync_playwright import Axe

    # no rule that runs reads style sheets: fetching them anew would take time and miss the imported ones
    options = {"resultTypes": ["violations"], "preload": False} | options
    found = Axe().run(page, context=context, options=options).response["violations"]
    return [(v["id"], n["html"][:160]) for v in found if v["impact"] in ("serious", "critical") for n in v["nodes"]]


def test_axe_finds_no_serious_fault(seen) -> None:
    if seen.theme == "light":  # only colours differ in the second theme
        # highlighted code is thousands of spans with nothing but colours; a long table's first rows stand for the others
        context = {"exclude": [[".main-svg"], [".highlight"], [".bd-article tbody tr:nth-child(n+5)"]]}
        assert serious(seen.page, context, {"rules": {"color-contrast": {"enabled": False}}}) == []
    if seen.path in CONTRAST_BY_AXE:
        assert seen.page.evaluate(MARK_STYLES) > 10
        # inside a figure our own test measures contrast
        context = {"include": [["[data-kv-style]"]], "exclude": [[".main-svg"]]}
        assert serious(seen.page, context, {"runOnly": ["color-contrast"]}) == []


def test_axe_sees_faint_text_of_any_style(visit) -> None:
    page = visit("how_to.html").page
    page.evaluate("""() => document.querySelector('.bd-article p')
      .insertAdjacentHTML('beforeend', '<b style="color: #8a8a8a">faint</b>')""")
    page.evaluate(MARK_STYLES)
    found = serious(page, {"include": [["[data-kv-style]"]]}, {"runOnly": ["color-contrast"]})
    assert [rule for rule, _ in found] == ["color-contrast"] and "faint" in found[0][1]


def test_every_text_stands_out_from_its_ground(seen) -> None:
    assert seen.page.evaluate(FAINT_TEXTS) == []


def test_faint_text_is_seen_by_the_check(visit) -> None:
    page = visit("how_to.html").page
    assert page.evaluate(FAINT_TEXTS) == []
    plant = """style => document.querySelector('.bd-article p')
      .insertAdjacentHTML('beforeend', `<b class="planted" style="${style}">faint</b>`)"""
    for style in ("color: #8a8a8a", "color: rgba(0, 0, 0, .4)", "opacity: .4", "color: #fff; background: #aaa"):
        page.evaluate(plant, style)
        assert [name.split()[0] for name, _ in page.evaluate(FAINT_TEXTS)] == ["B.planted"], style
        page.evaluate("document.querySelector('.planted').remove()")


def test_figures_of_the_executed_chapter_are_all_on_the_page(seen) -> None:
    copy = ROOT / "build" / "run" / (Path(seen.path).stem + ".ipynb")
    outputs = []
    if seen.path.startswith("chapters/"):
        outputs = [o for c in json.loads(copy.read_text())["cells"] for o in c.get("outputs", ())]
    made = sum("application/vnd.plotly.v1+json" in o.get("data", {}) for o in outputs)
    assert seen.page.locator(FIGURES).count() == made


def test_every_widget_is_mounted(seen) -> None:
    boxes = [w.bounding_box() for w in seen.page.locator("[data-kvlab-widget]").all()]
    assert seen.page.locator("[data-kvlab-widget][data-mounted=true]").count() == len(boxes)
    assert all(box and box["width"] > 50 and box["height"] > 50 for box in boxes)


def test_page_fits_a_phone(seen) -> None:
    if seen.theme == "light":
        return  # widths are the same in both themes, and the second is the last look at a loaded page
    from playwright.sync_api import TimeoutError

    seen.page.set_viewport_size({"width": 390, "height": 800})
    with contextlib.suppress(TimeoutError):  # figures redraw when their box changes
        seen.page.wait_for_function("document.documentElement.scrollWidth <= 390", timeout=3000)
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_page_is_small_and_refers_to_nothing_outside_its_folder(path) -> None:
    text = (HTML / path).read_text(encoding="utf-8")
    assert len(text.encode()) <= 1_000_000
    loads = re.findall(
        r"""(?:<script[^>]*src|<link[^>]*href|<img[^>]*src|@import|import\()\s*=?\s*["'(]?(https?://[^"')\s]+)""", text
    )
    assert [u for u in loads if "w3.org" not in u] == []
    assert re.findall(r"""(?:src|href)=["']/[^/"'][^"']*""", text) == []


def test_plotly_is_loaded_once_and_only_where_a_figure_is(visit) -> None:
    assert len(list(HTML.rglob("plotly*.js"))) == 1
    seen = visit("how_to.html")
    scripts = seen.page.evaluate("[...document.scripts].map(s => s.src)")
    assert not any("plotly" in s or "pyodide" in s for s in scripts)


def test_search_finds_a_word_of_a_chapter(visit) -> None:
    seen = visit("search.html?q=cache")
    seen.page.wait_for_selector("#search-results li a")
    assert seen.page.locator("#search-results li a").count() >= 2
    assert seen.errors == []


def test_theme_button_and_sidebar_work(visit) -> None:
    seen = visit("chapters/05_the_math.html")
    before = seen.page.evaluate("document.documentElement.dataset.theme")
    for _ in range(2):  # auto -> light -> dark, in some order
        seen.page.locator("button.theme-switch-button:visible").first.click()
    modes = {before, seen.page.evaluate("document.documentElement.dataset.theme")}
    assert modes <= {"light", "dark"}
    seen.page.locator(".bd-sidebar-primary a:has-text('Offloading')").first.click()
    seen.page.wait_for_url("**/12_offloading.html")
    assert seen.errors == []


def test_without_javascript_a_widget_leaves_a_table(plain_tab, path) -> None:
    text = (HTML / path).read_text(encoding="utf-8")
    assert len(re.sub(r"<[^>]+>", " ", text[text.index("<main") : text.index("</main>")]).split()) > 3
    if "data-kvlab-widget" not in text:
        return
    page = plain_tab.show(path, "light").page
    assert page.locator("main").inner_text().strip()
    for widget in page.locator("[data-kvlab-widget]").all():
        assert widget.locator("table tr").count() >= 4 and widget.locator("table").is_visible()
