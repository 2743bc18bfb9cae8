"""JupyterLab, driven once as a reader does: open a chapter, run all, move a slider, press Measure, see both bars."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RUN_SECONDS = 240
KERNEL_SECONDS = 120
MEASURE_SECONDS = 150  # 20 on a quiet machine

pytestmark = pytest.mark.book


def lab_command(extra: list[str], root: Path = ROOT) -> list[str]:
    """The very call that `make lab` makes."""
    spec = importlib.util.spec_from_file_location("open_lab", ROOT / "tools" / "open_lab.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.command(extra, root)


def chapter_with_explorer() -> Path:
    """The first chapter that shows the explorer; a test that finds none has nothing to drive and fails."""
    for path in sorted((ROOT / "chapters").glob("*.ipynb")):
        if "Explorer(" in path.read_text(encoding="utf-8"):
            return path
    pytest.fail("no chapter shows the explorer")


# what JupyterLab shows of text that it cannot render: a directive's fence, a role, and its own words for what it lacks
RAW = re.compile(r":::|\{[a-z:-]+\}`|Unknown (?:Directive|Role)|\w+ Not Found")
PLANTED = "A fence \\:::{note}, a role \\{cite}\\`a\\`, {cite}`nobody2000`.\n\n:::{nosuchdirective}\n:::\n"
RENDERED = """() => [...document.querySelectorAll('.jp-MarkdownCell .myst')].map(cell => {
  const copy = cell.cloneNode(true); copy.querySelectorAll('pre, code').forEach(e => e.remove());
  return [copy.textContent, ...[...copy.querySelectorAll('[title]')].map(e => e.title)].join(' '); })"""


def plant(notebook: Path) -> None:
    """Adds a last cell of text that JupyterLab cannot render, which the check of the rendered text has to find."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    content["cells"].append({"cell_type": "markdown", "id": "planted", "metadata": {}, "source": PLANTED})
    notebook.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a running JupyterLab on copies of the chapters, as a fresh user with an empty home."""
    home = tmp_path_factory.mktemp("home")
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "chapters", folder / "chapters")
    plant(folder / "chapters" / chapter_with_explorer().name)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    settings = home / "settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    # every cell is drawn, also outside the window: the test looks at all of them
    (settings / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')
    cache = os.environ.get("KVLAB_CACHE") or str(Path.home() / ".cache" / "kvlab")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JUPYTER")}
    environment |= {
        "HOME": str(home),
        "KVLAB_CACHE": cache,
        # kernels that earlier jobs compiled
        "NUMBA_CACHE_DIR": os.environ.get("NUMBA_CACHE_DIR")
        or os.environ.get("XDG_CACHE_HOME")
        or str(Path.home() / ".cache"),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "JUPYTER_PLATFORM_DIRS": "1",
    }
    flags = ["--no-browser", f"--port={port}", "--ip=127.0.0.1", f"--IdentityProvider.token={token}"]
    log = (folder / "log").open("w")
    server = subprocess.Popen(lab_command(flags, folder), env=environment, stdout=log, stderr=log, cwd=folder)
    address = f"http://127.0.0.1:{port}"
    for _ in range(240):
        try:
            urllib.request.urlopen(f"{address}/api?token={token}", timeout=2).read()
            break
        except OSError:
            time.sleep(0.5)
        if server.poll() is not None:
            pytest.fail(f"JupyterLab ended: {(folder / 'log').read_text()[-2000:]}")
    else:
        server.kill()
        pytest.fail(f"JupyterLab did not start: {(folder / 'log').read_text()[-2000:]}")
    yield f"{address}|{token}"
    server.terminate()
    server.wait(timeout=30)


# anywidget gives up on a module that takes over two seconds to load, as on a busy machine: here it always does
GIVE_UP = """AbortSignal.timeout = () => ({ addEventListener: (_, stop) => queueMicrotask(stop) });"""
PROMPTS = "() => [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(p => p.textContent.trim())"


def wait_for_kernel(page: object, address: str, token: str) -> None:
    """Returns when the notebook has its kernel and the page is connected to it.

    Run All before that makes JupyterLab ask for a kernel and start a second one.
    """
    end, seen = time.monotonic() + KERNEL_SECONDS, ""
    while time.monotonic() < end:
        with urllib.request.urlopen(f"{address}/api/sessions?token={token}", timeout=30) as reply:
            sessions = json.load(reply)
        seen = [(s["kernel"]["name"], s["kernel"]["execution_state"], s["kernel"]["connections"]) for s in sessions]
        shown = page.locator(".jp-Notebook-ExecutionIndicator").first.get_attribute("data-status")
        named = "No Kernel" not in page.locator(".jp-Toolbar-kernelName").first.inner_text()
        if len(seen) == 1 and seen[0][1] == "idle" and seen[0][2] >= 1 and shown == "idle" and named:
            return
        page.wait_for_timeout(500)
    pytest.fail(f"no kernel within {KERNEL_SECONDS} s: {seen}")


def run_all(page: object, cells: int) -> None:
    """Run > Run All Cells, once, and waits until all `cells` code cells have run; JupyterLab draws them by and by."""
    for _ in range(KERNEL_SECONDS):
        if len(page.evaluate(PROMPTS)) == cells:
            break
        page.wait_for_timeout(1000)
    page.get_by_role("menuitem", name="Run", exact=True).first.click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    for _ in range(RUN_SECONDS):
        prompts = page.evaluate(PROMPTS)
        status = page.locator(".jp-Notebook-ExecutionIndicator").first.get_attribute("data-status")
        if status == "idle" and len(prompts) == cells and all(re.fullmatch(r"\[\d+\]:", p) for p in prompts):
            return
        page.wait_for_timeout(1000)
    pytest.fail(f"not every cell ran within {RUN_SECONDS} s: {page.evaluate(PROMPTS)}")


def test_a_reader_runs_a_chapter_and_measures(lab, chromium) -> None:
    address, token = lab.split("|")
    chapter = chapter_with_explorer()
    code_cells = sum(c["cell_type"] == "code" for c in json.loads(chapter.read_text())["cells"])
    context = chromium.new_context(viewport={"width": 1500, "height": 2000})
    context.set_default_timeout(90_000)
    foreign: list[str] = []
    context.on(
        "request", lambda r: foreign.append(r.url) if not r.url.startswith((address, "blob:", "data:", "ws:")) else None
    )
    context.route(lambda url: not url.startswith((address, "blob:", "data:")), lambda route: route.abort())
    page = context.new_page()
    page.add_init_script(GIVE_UP)
    page.goto(f"{address}/lab/tree/chapters/{chapter.name}?token={token}")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    wait_for_kernel(page, address, token)
    run_all(page, code_cells)

    assert page.locator(".jp-CodeCell").count() == code_cells
    assert page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    shown = page.inner_text(".jp-Notebook")
    assert "Traceback" not in shown
    text_cells = 1 + sum(c["cell_type"] == "markdown" for c in json.loads(chapter.read_text())["cells"])
    page.wait_for_function("n => document.querySelectorAll('.jp-MarkdownCell .myst').length === n", arg=text_cells)
    *texts, planted = page.evaluate(RENDERED)
    assert [found for text in texts for found in RAW.findall(text)] == []
    assert RAW.findall(planted) == [":::", "{cite}`", "Unknown Directive", "Citation Not Found"]

    explorer = page.locator("section.kvx").first
    explorer.wait_for()
    summary = explorer.locator(".kvx-summary")
    before = summary.text_content()
    explorer.locator("[name=context]").evaluate(
        "e => { e.value = Number(e.value) + (e.value < 18 ? 1 : -1); e.dispatchEvent(new Event('input', {bubbles: true})); }"
    )
    page.wait_for_function("t => document.querySelector('section.kvx .kvx-summary').textContent !== t", arg=before)
    explorer.locator("button.kvx-measure").click()
    said = "() => [...document.querySelectorAll('.kvx-measure-panel [role=status]')].map(e => e.textContent).join()"
    for _ in range(MEASURE_SECONDS):
        if explorer.locator("rect.kvx-measured-measured").count():
            break
        page.wait_for_timeout(1000)
    else:
        pytest.fail(f"no bars after {MEASURE_SECONDS} s; the panel says: {page.evaluate(said)}")
    for name in ("predicted", "measured"):
        bars = explorer.locator(f"rect.kvx-measured-{name}").all()
        assert len(bars) == 2 and all(bar.bounding_box()["width"] >= 1 for bar in bars)
    assert foreign == []
    context.close()


def test_make_lab_opens_the_first_chapter() -> None:
    command = lab_command(["--no-browser"])
    assert command[:3] == [sys.executable, "-m", "jupyterlab"] and command[-1] == "--no-browser"
    assert any(part.endswith("chapters/01_key_takeaways.ipynb") for part in command)
