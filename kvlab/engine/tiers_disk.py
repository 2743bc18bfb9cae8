"""The disk tier: a directory of checksummed files (`kvlab.cache.tiers.files`), one for each saved page, written whole or
not at all.

A file is written under another name, flushed to the disk, then renamed: after a kill there is the whole file, or a
remainder that the next start removes. Whatever is wrong with a file, from a flipped bit to another model's fingerprint,
reading it is a miss. A file that turns out damaged is deleted.

The cap is the directory's: files of other fingerprints count too, and are the first to go when room is needed, those
that nobody used for longest in front. A file that cannot be deleted counts as long as it is there. Two models that are
served at once should have a directory each. Other processes may write and delete here at any moment: the directory is
looked through again at every 64th part of the cap written.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from kvlab.cache.tiers.files import SUM_BYTES, KnownFiles, header_of, payload_of

UNFINISHED = ".writing"
LOOKS = 64
"""How often the directory is looked through while files of `max_bytes` are written."""
STALE_S = 3600.0
"""Seconds after which no write is under way any more, whoever's process id it carries."""
# names of the files that this process is writing now
_WRITING: set[str] = set()
_NUMBER = itertools.count()


class DiskStore:
    """Files of one directory that carry this fingerprint.

    Args:
        directory: made when it is not there.
        fingerprint: 32 bytes that stand for model and storage.
        max_bytes: of all page files in the directory, at the start and after every write; two processes that write at
            once may be above it by one part in `LOOKS` each. With more than that in files that cannot be deleted,
            nothing is written.

    Raises:
        ValueError: the directory cannot be used, or a fingerprint of another length.

    Attributes:
        known: the files of the directory.
        failures: what went wrong, the newest 100, newest last; the engine goes on without the file.
        gone: pages of decisions that nobody has told yet, by kind ("evict", "lost") and reason.
    """

    def __init__(self, directory: str | Path, fingerprint: bytes, max_bytes: int) -> None:
        if len(fingerprint) != 32:
            raise ValueError(f"fingerprint of {len(fingerprint)} bytes: must have 32")
        self.directory, self.fingerprint, self.max_bytes = Path(directory), fingerprint, max_bytes
        self.known = KnownFiles(self.directory, fingerprint)
        self.failures: deque[str] = deque(maxlen=100)
        self.gone: Counter[tuple[str, str]] = Counter()
        # for tests: called between the stages of a write
        self.on_stage: Callable[[str], None] = lambda stage: None
        self._written = 0
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_unfinished()
            self.known.look()
        except OSError as error:
            raise ValueError(f"disk_dir {directory}: cannot be used ({error.strerror or error})") from None
        self._make_room(0)

    def has(self, name: bytes) -> bool:
        """Whether a file of that name is known; reading it may still fail."""
        return name in self.known

    @property
    def num_files(self) -> int:
        """How many files of this fingerprint are known."""
        return len(self.known)

    @property
    def num_bytes(self) -> int:
        """Bytes of all page files in the directory, as far as is known."""
        return self.known.used_bytes + self.known.foreign_bytes

    def touch(self, name: bytes) -> None:
        """The file of that name, if one is known, is the last to go: for this process, its time on disk stays."""
        self.known.touch(name)

    def forget(self, name: bytes) -> None:
        """Deletes the file of that name, if there is one. One that cannot be deleted is not found any more."""
        if self._deleted(name, "forget"):
            self.known.leave(name)
        else:
            self.known.give_up(name)

    def _deleted(self, name: bytes, why: str) -> bool:
        """Whether there is no file of that name now; what is known of it stays."""
        try:
            self.known.path(name).unlink(missing_ok=True)
        except OSError as error:
            self.failures.append(f"{why}: {error.strerror or error}")
            return False
        return True

    def expel(self, names: Iterable[bytes]) -> None:
        """As `forget`, for files that no later process may find either, whoever wrote them. One that cannot be deleted
        is emptied."""
        if any([self._remove(name) for name in names]):
            with suppress(OSError):
                self._sync_directory()

    def _remove(self, name: bytes) -> bool:
        """Whether there was a file of that name, which is of no use to anybody from now on."""
        self.known.leave(name)
        path = self.known.path(name)
        if not os.path.lexists(path):
            return False
        if not self._deleted(name, "expel"):
            with suppress(OSError):
                os.truncate(path, 0)
            self.known.give_up(name)
        return True

    def notes(self) -> list[tuple[bytes, str]]:
        """Name and note of every file that has a note, the note not yet checked against its sum."""
        return self.known.notes()

    def write(self, name: bytes, payload: memoryview, note: str = "") -> bool:
        """Whether the payload is safely on disk. If not, as the disk is full or there is no room under the cap, nothing of
        it is, which is a failure and a loss to tell; files that made room for it are gone all the same."""
        text = note.encode()
        header = header_of(self.fingerprint, name, text, payload)
        size = len(header) + len(text) + len(payload) + SUM_BYTES
        if name in self.known:
            return True
        # two engines of one process may be writing the same page
        unfinished = self.directory / f"{name.hex()}.{os.getpid()}.{next(_NUMBER)}{UNFINISHED}"
        _WRITING.add(unfinished.name)
        renamed = False
        try:
            # somebody may have removed the directory
            self.directory.mkdir(parents=True, exist_ok=True)
            self._written += size
            if self._written > self.max_bytes // LOOKS:
                self._written = 0
                self.known.look()
                if name in self.known:
                    # another process wrote it
                    return True
            if not self._make_room(size):
                raise OSError(f"no room for {size} bytes under a cap of {self.max_bytes}")
            self._write_file(unfinished, (header, text, payload))
            os.replace(unfinished, self.known.path(name))
            renamed = True
            self.on_stage("renamed")
            self._sync_directory()
        except OSError as error:
            self.fail(f"write: {error.strerror or error}")
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            if renamed:
                # until then, a file of that name is another process' and whole
                self.forget(name)
            return False
        finally:
            _WRITING.discard(unfinished.name)
        self.known.enter(name, size, note)
        return True

    def fail(self, what: str) -> None:
        """Notes that a page was lost, as its file could not be written."""
        self.failures.append(what)
        self.gone["lost", f"disk: {what}"] += 1

    def read(self, name: bytes, into: memoryview) -> bool:
        """Whether `into` now holds exactly what was written; what could not be read is forgotten and deleted."""
        if name not in self.known:
            return False
        try:
            data = self.known.path(name).read_bytes()
            payload = payload_of(data, self.fingerprint, name, len(into))
        except (OSError, ValueError) as error:
            self.failures.append(f"read: {error}")
            self.forget(name)
            return False
        into[:] = payload
        self.known.touch(name)
        with suppress(OSError):
            # the order of use, for the next process; a directory that is read only keeps the old one
            os.utime(self.known.path(name))
        return True

    def _remove_unfinished(self) -> None:
        """Removes what killed processes left unfinished."""
        for path in self.directory.iterdir():
            if path.name.endswith(UNFINISHED):
                # whatever else bears such a name, another user's file or a directory, stays and stops nobody
                with suppress(OSError):
                    if not _is_alive(path.name) or time.time() - path.stat().st_mtime > STALE_S:
                        path.unlink()

    def _write_file(self, path: Path, pieces: tuple[bytes | memoryview, ...]) -> None:
        digest = hashlib.sha256()
        with path.open("wb") as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
                self.on_stage("piece")
            file.write(digest.digest())
            file.flush()
            self.on_stage("written")
            os.fsync(file.fileno())
        self.on_stage("synced")

    def _sync_directory(self) -> None:
        """Makes the rename itself survive a crash of the machine, where directories can be flushed."""
        descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _make_room(self, size: int) -> bool:
        """Whether so many bytes more are within the cap, for which files may have gone."""
        if size > self.max_bytes:
            return False
        over, deleted = self.num_bytes + size - self.max_bytes, []
        for why, name, num_bytes in self.known.first_to_go():
            if over <= 0:
                break
            if self._deleted(name, "evict"):
                deleted.append(name)
                over -= num_bytes
                self.gone["evict", f"disk: {why}, disk_bytes {self.max_bytes}"] += 1
        for name in deleted:
            self.known.leave(name)
        return over <= 0


def _is_alive(unfinished: str) -> bool:
    """Whether the process that is writing a file of that name still runs. One's own id may be that of a killed one:
    containers start anew with the same ids."""
    try:
        owner = int(unfinished.split(".")[1])
        if owner == os.getpid():
            return unfinished in _WRITING
        os.kill(owner, 0)
    except (ValueError, IndexError, OverflowError, ProcessLookupError):
        # no process has such an id
        return False
    except PermissionError:
        pass
    return True
