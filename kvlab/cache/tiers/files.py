"""Page files of a directory: how one is laid out, and which of them are known. Nothing here writes or deletes.

    file = header, note, payload, sha256 over all before it
    header = magic, fingerprint of model and storage, name, lengths of note and payload

Whatever is wrong with a file, from a flipped bit to another model's fingerprint, it is none of this model's.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

MAGIC = b"kvlab page 1\0\0\0\0"
HEADER = struct.Struct("<16s32s32sQQ")
SUM_BYTES = 32
SUFFIX = ".page"


def header_of(fingerprint: bytes, name: bytes, note: bytes, payload: memoryview) -> bytes:
    """The header of a file."""
    return HEADER.pack(MAGIC, fingerprint, name, len(note), len(payload))


def payload_of(data: bytes, fingerprint: bytes, name: bytes, length: int) -> memoryview:
    """The payload, of `length` bytes, in a file's bytes.

    Raises:
        ValueError: anything about them is not as it was written.
    """
    if len(data) < HEADER.size + SUM_BYTES:
        raise ValueError(f"{len(data)} bytes, fewer than header and sum")
    magic, whose, own, note_bytes, payload_bytes = HEADER.unpack_from(data)
    if (magic, whose, own) != (MAGIC, fingerprint, name):
        raise ValueError("another format, model or page")
    if payload_bytes != length or len(data) != HEADER.size + note_bytes + payload_bytes + SUM_BYTES:
        raise ValueError(f"{len(data)} bytes, not what its header says")
    if hashlib.sha256(data[:-SUM_BYTES]).digest() != data[-SUM_BYTES:]:
        raise ValueError("the checksum does not agree")
    return memoryview(data)[HEADER.size + note_bytes : -SUM_BYTES]


def note_of(path: Path, fingerprint: bytes) -> str | None:
    """The note of a file that claims this fingerprint and its own name, None for one that does not.

    Raises:
        FileNotFoundError: it is gone.
    """
    try:
        with path.open("rb") as file:
            head = file.read(HEADER.size)
            if len(head) < HEADER.size:
                return None
            magic, whose, name, note_bytes, _ = HEADER.unpack(head)
            size = path.stat().st_size
            if (magic, whose) != (MAGIC, fingerprint) or path.stem != name.hex() or note_bytes > size:
                return None
            note = file.read(note_bytes)
            # notes are acted upon without reading a payload, so their sum is checked now
            rest = file.read() if note_bytes else b""
    except FileNotFoundError:
        raise
    except OSError:
        return None
    if note_bytes and hashlib.sha256(head + note + rest[:-SUM_BYTES]).digest() != rest[-SUM_BYTES:]:
        return None
    return note.decode(errors="replace")


def name_of(path: Path) -> bytes | None:
    """The name of a page file, None for what is none."""
    with suppress(ValueError):
        name = bytes.fromhex(path.stem)
        if path.suffix == SUFFIX and len(name) == 32 and name.hex() == path.stem:
            return name
    return None


class KnownFiles:
    """The page files of a directory, as they were when it was last looked through, and what was entered since.

    Args:
        directory: that they lie in. fingerprint: of those that can be found.

    Attributes:
        used_bytes, foreign_bytes: of the files that can be found, and of all others: other models', damaged ones.
        on_change: told of a file that can be found from now on, with its note, or with None not any more.
    """

    def __init__(self, directory: Path, fingerprint: bytes) -> None:
        self.directory, self.fingerprint = directory, fingerprint
        self.used_bytes = self.foreign_bytes = 0
        self.on_change: Callable[[bytes, str | None], None] = lambda name, note: None
        # name -> bytes, the first to go in front
        self._files: OrderedDict[bytes, int] = OrderedDict()
        self._foreign: OrderedDict[bytes, int] = OrderedDict()
        self._notes: dict[bytes, str] = {}

    def __contains__(self, name: bytes) -> bool:
        return name in self._files

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._files)

    def path(self, name: bytes) -> Path:
        """Where the file of that name lies."""
        return self.directory / (name.hex() + SUFFIX)

    def touch(self, name: bytes) -> None:
        """The file of that name, if one can be found, is the last to go."""
        if name in self._files:
            self._files.move_to_end(name)

    def notes(self) -> list[tuple[bytes, str]]:
        """Name and note of every file that can be found and has a note."""
        return list(self._notes.items())

    def enter(self, name: bytes, size: int, note: str | None) -> None:
        """Knows a file from now on; no note at all: it is of no use to this model."""
        self.leave(name)
        if note is None:
            self._foreign[name] = size
            self.foreign_bytes += size
            return
        self._files[name] = size
        self.used_bytes += size
        if note:
            self._notes[name] = note
        self.on_change(name, note)

    def leave(self, name: bytes) -> None:
        """Knows the file of that name no more."""
        if name in self._files:
            self.on_change(name, None)
        self.used_bytes -= self._files.pop(name, 0)
        self.foreign_bytes -= self._foreign.pop(name, 0)
        self._notes.pop(name, None)

    def give_up(self, name: bytes) -> None:
        """Finds the file of that name no more, and counts its bytes as long as it is there."""
        self.leave(name)
        with suppress(OSError):
            self.enter(name, self.path(name).stat().st_size, None)

    def look(self) -> None:
        """Learns which files are there now, the longest unused first, and which are not there any more.

        Raises:
            OSError: the directory cannot be read.
        """
        there = {name: path for path in self.directory.iterdir() if (name := name_of(path))}
        for name in {*self._files, *self._foreign} - there.keys():
            self.leave(name)
        found = []
        for name in there.keys() - self._files.keys() - self._foreign.keys():
            # another process may take a file away at any moment, and what cannot be looked at is none
            with suppress(OSError):
                at = there[name].stat()
                found.append((at.st_mtime_ns, name, at.st_size, note_of(there[name], self.fingerprint)))
        for _, name, size, note in sorted(found, key=lambda file: file[:2]):
            self.enter(name, size, note)

    def first_to_go(self) -> Iterator[tuple[str, bytes, int]]:
        """(why, name, bytes) of every file, others' before one's own, the longest unused in front; not to be changed
        meanwhile."""
        for why, files in (("of no use to this model", self._foreign), ("lru", self._files)):
            for name, num_bytes in files.items():
                yield why, name, num_bytes
