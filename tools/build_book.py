"""Builds the published book into _build/html: run chapters, lay out the sources, build with warnings as errors, add assets.

One execution of a chapter serves its test and its page: the pages come from the executed copies in build/run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).resolve().parent))

import assets  # noqa: E402
import page_numbers  # noqa: E402
import run_chapters  # noqa: E402
import status_page  # noqa: E402

SOURCE = ROOT / "build" / "book"
HTML = ROOT / "_build" / "html"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
ONLY_FOR_LAB = (WIDGET_VIEW, "application/vnd.plotly.v1+json")
# the theme offers to run cells on a remote server; this book runs without one, and pages name no other host
THEBE = re.compile(
    r"<script[^>]*>[^<]*THEBE_JS_URL[^<]*</script>\s*|<script[^>]*(?:thebe)[^>]*></script>\s*|<link[^>]*thebe[^>]*>\s*"
)


def for_the_page(notebook: dict) -> dict:
    """The executed notebook without what only JupyterLab can draw.

    Raises:
        ValueError: an output has no form that a page without a kernel can show.
    """
    notebook["metadata"].pop("widgets", None)
    for number, cell in enumerate(notebook["cells"]):
        cell.get("metadata", {}).pop("execution", None)
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if WIDGET_VIEW in data and "text/html" not in data:
                raise ValueError(f"cell {number}: a widget without text/html: the published page would be empty there")
            if "text/html" in data:
                for kind in ONLY_FOR_LAB:
                    data.pop(kind, None)
    return notebook


def not_ready() -> list[str]:
    """Chapters without a passed run, one line each: their pages would be missing, or show what went wrong."""
    found = []
    for path in run_chapters.chapters():
        record = run_chapters.RUN / f"{path.stem}.json"
        if not record.exists() or not (run_chapters.RUN / path.name).exists():
            found.append(f"{path.name}: has not run")
        elif json.loads(record.read_text())["result"] != "passed":
            found.append(f"{path.name}: failed")
    return found


def lay_out() -> None:
    """Fills build/book: the pages of book/ at its root, chapters as executed, the status page as of now."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    (SOURCE / "chapters").mkdir(parents=True)
    for name in ("_config.yml", "_toc.yml"):
        shutil.copy(ROOT / name, SOURCE)
    for path in (ROOT / "book").iterdir():
        if path.name == "results":
            continue
        if path.is_dir():
            shutil.copytree(path, SOURCE / path.name)
        elif path.suffix == ".md":
            (SOURCE / path.name).write_text(page_numbers.filled(path.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            shutil.copy(path, SOURCE)
    for path in run_chapters.chapters():
        executed = json.loads((run_chapters.RUN / path.name).read_text(encoding="utf-8"))
        try:
            (SOURCE / "chapters" / path.name).write_text(json.dumps(for_the_page(executed)), encoding="utf-8")
        except ValueError as error:
            sys.exit(f"book: {path.name}: {error}")
    (SOURCE / "status.md").write_text(status_page.page(), encoding="utf-8")


def sphinx() -> int:
    """Runs Jupyter Book on build/book; its exit code (a warning is an error)."""
    shutil.rmtree(ROOT / "_build", ignore_errors=True)
    command = [str(Path(sys.executable).parent / "jupyter-book"), "build", str(SOURCE), "--path-output", str(ROOT),
               "-W", "-n", "--keep-going", "-q"]  # fmt: skip
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONWARNINGS": "ignore"}, check=False).returncode


def clean_pages() -> None:
    """Takes the theme's remote-execution scripts out of every page, and a list role that has no list items below it."""
    for page in HTML.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        text = THEBE.sub("", text).replace('<div role="list" class="citation-list">', '<div class="citation-list">')
        page.write_text(text, encoding="utf-8")
    for path in HTML.joinpath("_static").glob("*thebe*"):
        path.unlink()


def main() -> int:
    """Builds the book; 1 when a chapter fails or the build warns."""
    if (
        "--keep-run" not in sys.argv[1:]
        and subprocess.run([sys.executable, "tools/run_chapters.py"], cwd=ROOT).returncode
    ):
        print("book: not built, because a chapter failed")
        return 1
    if missing := not_ready():
        print("\n".join(f"book: {line}" for line in missing) + "\nbook: not built; `make chapters` runs them")
        return 1
    assets.npm_packages()
    lay_out()
    if sphinx():
        print("book: the build warned or failed; see the lines above")
        return 1
    clean_pages()
    assets.copy_all(HTML / "_static")
    print(f"book: built in {HTML.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
