"""How long pages take to the tiers below and back, beside what their bytes take at the medium's own speed.

The medium's speed is measured in the same run: one large copy in memory, one large file written through to the disk and
read back. A file that was just written is read from the page cache, so its reading speed is the system's, not the
disk's; the result says so.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kvlab.cache.tiers import HostSlots
from kvlab.engine import Engine
from kvlab.engine.tiers_disk import DiskStore
from kvlab.engine.tiers_memory import HostMemory

REPEATS = 3


@dataclass(frozen=True)
class Transfer:
    """One way of moving pages.

    Attributes:
        way: what moved where. pages, num_bytes: how much.
        seconds: the shortest of the repeats.
        medium_bytes_per_s: of one large piece on the same way.
    """

    way: str
    pages: int
    num_bytes: int
    seconds: float
    medium_bytes_per_s: float

    @property
    def expected_s(self) -> float:
        """Seconds that the bytes take at the medium's speed."""
        return self.num_bytes / self.medium_bytes_per_s

    @property
    def ratio(self) -> float:
        """Measured over expected: 1 is the medium's own speed."""
        return self.seconds / self.expected_s


def measure_transfers(engine: Engine, pages: int, directory: str | Path | None = None) -> list[Transfer]:
    """Moves `pages` pages of the engine's first group out to host memory and to disk, and back.

    The engine's pages are read and written with their own bytes; nothing else is changed.

    Raises:
        ValueError: more pages than the pool has.
    """
    have = engine.num_blocks[engine.layout.pool_of(0)] - 1
    if not 0 < pages <= have:
        raise ValueError(f"pages {pages}: must be from 1 to the {have} of the pool")
    size = engine.layout.page_bytes(0)
    slots = HostSlots(engine.layout, pages * max(engine.layout.page_bytes(g) for g in range(len(engine.groups))))
    memory = HostMemory(engine.storage, slots)
    moves = [(0, page, slots.take(0)) for page in range(1, pages + 1)]
    num_bytes = pages * size
    host = memory_speed(num_bytes, memory.device)

    def move(down: bool) -> None:
        memory.wait(memory.start(moves, down))

    found = [
        Transfer("pool to host memory", pages, num_bytes, _shortest(lambda: move(True)), host),
        Transfer("host memory to pool", pages, num_bytes, _shortest(lambda: move(False)), host),
    ]
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        found += _disk(Path(folder), memory, [slot for _, _, slot in moves], num_bytes)
    return found


def _disk(folder: Path, memory: HostMemory, slots: list[int], num_bytes: int) -> list[Transfer]:
    write, read = _file_speed(folder / "one", num_bytes)
    store = DiskStore(folder / "pages", bytes(32), 4 * num_bytes + (1 << 20))
    names = [i.to_bytes(32, "little") for i in range(len(slots))]
    start = time.perf_counter()
    for name, slot in zip(names, slots, strict=True):
        store.write(name, memory.memory(0, slot))
    wrote = time.perf_counter() - start

    def read_all() -> None:
        for name, slot in zip(names, slots, strict=True):
            store.read(name, memory.memory(0, slot))

    return [
        Transfer("host memory to disk, flushed", len(slots), num_bytes, wrote, write),
        Transfer("disk (page cache) to host memory", len(slots), num_bytes, _shortest(read_all), read),
    ]


def _shortest(work: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def memory_speed(num_bytes: int, device: torch.device) -> float:
    """Bytes per second of one copy of that size between the pool's device and host memory."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def copy() -> None:
        target.copy_(source)

    return num_bytes / _shortest(copy)


def _file_speed(path: Path, num_bytes: int) -> tuple[float, float]:
    """(written and flushed, read back) bytes per second of one file of that size."""
    data = os.urandom(num_bytes)
    start = time.perf_counter()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    wrote = time.perf_counter() - start
    read = _shortest(lambda: path.read_bytes() and None)
    path.unlink()
    return num_bytes / wrote, num_bytes / read
