"""Numba, when it is there: one decorator for all CPU kernels, and their cache on disk.

Numba reuses a cached kernel while the file of that kernel is unchanged, and does not look at the files it
calls into. The cache folder is therefore named by a hash of every file that kernels are made of: the `cpu*.py` of
`kvlab.ops`, the `rows*.py` and `numba*.py` of `kvlab.quant`, and this one.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvlab.quant.numba_flags import FASTMATH

_lock = threading.RLock()


@cache
def available() -> bool:
    """Whether Numba can be imported here."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def cache_dir() -> str:
    """A writable folder for compiled kernels: below NUMBA_CACHE_DIR, XDG_CACHE_HOME or ~/.cache, else temporary."""
    root = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    digest = hashlib.sha256()
    here = Path(__file__).parent
    quant = here.parent / "quant"
    for path in sorted([Path(__file__), *here.rglob("cpu*.py"), *quant.glob("rows*.py"), *quant.glob("numba*.py")]):
        digest.update(path.read_bytes())
    folder = Path(root) / "kvlab" / f"numba-{digest.hexdigest()[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder)
    except OSError:
        return tempfile.mkdtemp(prefix="kvlab-numba-")


def kernel(parallel: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that compiles a function on first use and keeps the result on disk."""
    import numba

    def wrap(function: Callable[..., Any]) -> Any:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = cache_dir()
        try:
            return numba.njit(cache=True, parallel=parallel, fastmath=FASTMATH, error_model="numpy")(function)
        finally:
            numba.config.CACHE_DIR = before

    return wrap


@cache
def _start_threads() -> None:
    """Starts Numba's threads. Where both use OpenMP that sets torch's number of threads too: it is put back."""
    import numba

    before = torch.get_num_threads()
    numba.get_num_threads()
    torch.set_num_threads(before)


def num_threads() -> int:
    """Threads of a launch: as many as torch uses, as far as Numba has them."""
    import numba

    return min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)


def launch(function: Any, *args: Any) -> Any:
    """`function(*args)` on `num_threads()` threads, one launch at a time.

    The lock is there because Numba's portable thread pool ends the process when two Python threads use it.
    """
    import numba

    with _lock:
        _start_threads()
        threads = num_threads()
        if numba.get_num_threads() != threads:
            numba.set_num_threads(threads)
        return function(*args)
