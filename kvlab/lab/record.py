"""The provenance that every recorded result carries: when, on what, with which code and which versions."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def provenance(command: str, packages: tuple[str, ...] = ("torch", "numba")) -> dict[str, Any]:
    """`date`, `commit`, `device`, `versions` and `command`, the fields that `kvlab.book.results` asks for."""
    import kvlab

    versions = {"kvlab": kvlab.__version__, "python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "device": device_name(),
        "versions": versions,
        "command": command,
    }


def commit() -> str:
    """The checkout's commit, with "+changes" when the package differs from it; "unknown" outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "kvlab"], cwd=root, check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+changes" if changed else "")


def device_name() -> str:
    """The device that computes, for people: the CUDA device, or the processor and its cores."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {os.cpu_count()} cores"


def cpu_name() -> str:
    """The processor's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
