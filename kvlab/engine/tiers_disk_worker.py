"""The disk tier's thread: files are written, flushed, read and deleted there, in the order in which it was asked.

The engine's thread waits for none of it but in four places: when more bytes wait to be written than may, when every
request waits for a read, when pages are expelled, and in `drain`. What it knows of the directory is what the worker has
told it, which it takes over in these and in `poll`: a file counts from the moment on at which its write was told to have
ended, not from when it was asked for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_WAITING = 256 << 20
"""Bytes of pages that may wait to be written."""
# the last job of each worker of a directory: whoever opens one anew in this process waits for them
_LAST: dict[Path, dict[int, Future]] = {}


@dataclass(eq=False)
class Job:
    """Something that the worker was asked to do.

    Attributes:
        num_bytes: that are held for it. writes, leaves: names of files that it makes, or deletes.
        ok: whether it was done; None: it is not known to have ended.
    """

    future: Future
    num_bytes: int = 0
    writes: bytes = b""
    leaves: tuple[bytes, ...] = ()
    ok: bool | None = None


class DiskWorker:
    """A `kvlab.cache.tiers.saved.Disk` that works in a thread of its own.

    Args:
        store: what does the work (`kvlab.engine.tiers_disk.DiskStore`); only the thread touches it from now on.
        max_waiting: bytes of pages that may wait to be written; who brings more waits until some of them are.
        pool: where jobs run, one after the other; None: a thread that ends with this object or the process, once all
            that was asked is done.

    Attributes:
        gone: pages of decisions that nobody has told yet, as the store's.
        failures: what went wrong, the newest 100, newest last.
    """

    def __init__(self, store: Any, max_waiting: int = MAX_WAITING, pool: Executor | None = None) -> None:
        self.store, self.max_waiting, self.pool = store, max_waiting, pool
        self._directory = store.directory.resolve()
        self.gone: Counter[tuple[str, str]] = Counter(store.gone)
        store.gone.clear()
        self.failures: deque[str] = deque(store.failures, 100)
        store.failures.clear()
        self._names = {name: "" for name in store.known} | dict(store.notes())
        self._jobs: deque[Job] = deque()
        self._waiting_bytes = 0
        # the last writing or deleting that was asked for each name and has not ended, and names that are not to be found
        # whatever the worker tells of earlier jobs
        self._latest: dict[bytes, Job] = {}
        self._leaving: Counter[bytes] = Counter()
        # in order of use, told to the worker with the next job
        self._touched: dict[bytes, None] = {}

    @property
    def num_files(self) -> int:
        """How many files are known."""
        return len(self._names)

    def notes(self) -> list[tuple[bytes, str]]:
        """Name and note of every file that has a note."""
        return [(name, note) for name, note in self._names.items() if note]

    def has(self, name: bytes) -> bool:
        """Whether a file of that name is known; reading it may still fail."""
        return name in self._names

    def is_coming(self, name: bytes) -> bool:
        """Whether a file of that name is being written, or waits for that."""
        return name in self._latest and bool(self._latest[name].writes)

    def touch(self, name: bytes) -> None:
        """The file of that name, if one is known, is the last to go from now on."""
        if name in self._names:
            self._touched.pop(name, None)
            self._touched[name] = None

    def write(self, name: bytes, payload: memoryview, note: str = "") -> None:
        """Has a copy of the payload written, unless it is there or on its way."""
        if name in self._names or self.is_coming(name):
            return
        held = len(payload) + len(note)
        while self._jobs and self._waiting_bytes + held > self.max_waiting:
            self.wait(self._jobs[0])
        own = bytes(payload)
        self._ask(lambda: self.store.write(name, memoryview(own), note), held, name)

    def read(self, name: bytes, into: memoryview) -> Job:
        """The job that fills `into`, which belongs to it until it has ended."""
        return self._ask(lambda: self.store.read(name, into))

    def forget(self, name: bytes) -> None:
        """Has the file of that name deleted; it is not found any more."""
        if name in self._names or self.is_coming(name):
            self._forget([name])
            self._ask(lambda: self.store.forget(name), leaves=(name,))

    def expel(self, names: Iterable[bytes]) -> None:
        """As `forget`, for files that no later process may find either, whoever wrote them: when it returns they are
        gone."""
        names = tuple(names)
        self._forget(names)
        self.wait(self._ask(lambda: self.store.expel(names), leaves=names))

    def _forget(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._names.pop(name, None)
            self._touched.pop(name, None)
            self._leaving[name] += 1

    def result(self, job: Job) -> bool | None:
        """Whether the job was done; None as long as it is not known to have ended."""
        return job.ok

    def wait(self, job: Job) -> None:
        """Returns once the job is known to have ended, and all before it."""
        while self._jobs and job.ok is None:
            self._settle()

    def drain(self) -> None:
        """Returns once all that was asked is done."""
        while self._jobs:
            self._settle()

    def close(self) -> None:
        """Returns once all that was asked is done and the thread has ended. Whoever asks again gets a new one."""
        self.drain()
        _LAST.get(self._directory, {}).pop(id(self), None)
        if isinstance(self.pool, ThreadPoolExecutor):
            self.pool.shutdown()
            self.pool = None

    def poll(self) -> None:
        """Takes over what the worker has told since the last time."""
        while self._jobs and self._jobs[0].future.done():
            self._settle()

    def _ask(
        self, work: Callable[[], Any], num_bytes: int = 0, writes: bytes = b"", leaves: tuple[bytes, ...] = ()
    ) -> Job:  # fmt: skip
        if self.pool is None:
            self.pool = ThreadPoolExecutor(1, "kvlab-disk")
        touched, self._touched = list(self._touched), {}
        future = self.pool.submit(_done, self.store, touched, work, bool(writes))
        _LAST.setdefault(self._directory, {})[id(self)] = future
        job = Job(future, num_bytes, writes, leaves)
        self._latest |= dict.fromkeys((writes,) if writes else leaves, job)
        self._jobs.append(job)
        self._waiting_bytes += num_bytes
        return job

    def _settle(self) -> None:
        """Waits for the first job, and takes over what the worker told of it."""
        job = self._jobs[0]
        done, changes, gone, failures = job.future.result()
        self._jobs.popleft()
        job.ok = bool(done)
        self._waiting_bytes -= job.num_bytes
        for name in (job.writes, *job.leaves):
            if self._latest.get(name) is job:
                del self._latest[name]
        self.gone.update(gone)
        self.failures += failures
        for name, note in changes:
            if note is None:
                self._names.pop(name, None)
            elif name not in self._leaving:
                self._names[name] = note
        for name in job.leaves:
            self._leaving[name] -= 1
            if not self._leaving[name]:
                del self._leaving[name]


def settled(directory: str | Path) -> None:
    """Returns once all that this process was asked to do in that directory so far is done."""
    for last in list(_LAST.get(Path(directory).resolve(), {}).values()):
        last.result()


def _done(
    store: Any, touched: list[bytes], work: Callable[[], Any], writes: bool
) -> tuple[Any, list, Counter, list[str]]:
    """In the thread: what `work` returned, the files that came and went, the decisions to tell, what went wrong."""
    changes: list[tuple[bytes, str | None]] = []
    store.known.on_change = lambda name, note: changes.append((name, note))
    for name in touched:
        store.touch(name)
    try:
        done = work()
    except Exception as error:
        # whatever it is, the engine goes on without the file
        done = False
        what = f"{type(error).__name__}: {error}"
        if writes:
            store.fail(what)
        else:
            store.failures.append(what)
    gone, store.gone = store.gone, Counter()
    failures = list(store.failures)
    store.failures.clear()
    return done, changes, gone, failures
