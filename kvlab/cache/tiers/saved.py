"""Saved pages: by name, in host memory, on disk, or both; the least recently used go first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvlab.cache.tiers.slots import HostSlots


class Disk(Protocol):
    """The disk tier. Every failure of it is a miss: it never raises for one, and never returns wrong bytes.

    Attributes:
        gone: as `SavedPages.gone`, of files.
    """

    gone: Counter[tuple[str, str]]

    def has(self, name: bytes) -> bool:
        """Whether a file of that name is known; reading it may still fail."""

    def write(self, name: bytes, payload: memoryview, note: str = "") -> bool:
        """Whether the payload is safely on disk."""

    def touch(self, name: bytes) -> None:
        """The file of that name, if one is known, is the last to go from now on."""

    def read(self, name: bytes, into: memoryview) -> bool:
        """Whether `into` now holds exactly what was written; what could not be read is forgotten."""

    def forget(self, name: bytes) -> None:
        """Deletes the file of that name, if there is one."""

    def expel(self, names: Iterable[bytes]) -> None:
        """As `forget`, for files that no later process may find either, whoever wrote them."""

    @property
    def num_files(self) -> int:
        """How many files are known."""

    def notes(self) -> list[tuple[bytes, str]]:
        """Name and note of every file that has a note."""


@dataclass(eq=False)
class Entry:
    """A saved page in host memory.

    Attributes:
        pins: copies and lookups that use it now.
        ready: its bytes are there.
        expelled: nobody finds it any more; its place is free as soon as nobody uses it.
    """

    name: bytes
    group: int
    slot: int
    pins: int = 0
    ready: bool = True
    expelled: bool = False


class SavedPages:
    """Saved pages of all groups.

    Args:
        slots: the places in host memory, shared with parked requests.
        memory: the bytes of a slot.
        disk: the tier below, or None.

    Attributes:
        gone: pages that went, by kind of event ("evict", "lost") and reason; who tells of them takes them out.
    """

    def __init__(
        self, slots: HostSlots, memory: Callable[[int, int], memoryview], disk: Disk | None
    ) -> None:  # fmt: skip
        self.slots, self.memory, self.disk = slots, memory, disk
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self.gone: Counter[tuple[str, str]] = Counter()
        # pages that were read from disk so far
        self.reads = 0

    def has(self, name: bytes) -> bool:
        """Whether the page is in host memory or on disk."""
        return name in self._entries or bool(self.disk and self.disk.has(name))

    def entry(self, name: bytes) -> Entry | None:
        """The page in host memory, None when it is not there.

        It and its file are the most recently used from now on.
        """
        entry = self._entries.get(name)
        if entry is not None:
            self._entries.move_to_end(name)
        if self.disk:
            self.disk.touch(name)
        return entry

    def fetch(self, name: bytes, group: int) -> Entry | None:
        """As `entry`, reading from disk what is only there."""
        entry = self.entry(name)
        if entry is None and self.disk and self.disk.has(name):
            slot = self.take_slot(group)
            if slot is None:
                return None
            if not self.disk.read(name, self.memory(group, slot)):
                self.slots.free(group, slot)
                return None
            entry = self._entries[name] = Entry(name, group, slot)
            self.reads += 1
        return entry

    def add(self, name: bytes, group: int) -> Entry | None:
        """A place in host memory for a page that is not there yet, pinned until `arrived`; None when there is none."""
        slot = self.take_slot(group)
        if slot is None:
            return None
        entry = self._entries[name] = Entry(name, group, slot, pins=1, ready=False)
        return entry

    def arrived(self, entry: Entry) -> None:
        """The page's bytes are in its place; they go on to the disk, unless it was expelled on its way."""
        entry.ready = True
        if not entry.expelled:
            self.write_down(entry.name)
        self.unpin([entry])

    def pin(self, entries: Iterable[Entry]) -> None:
        """One copy or lookup more uses each of them."""
        for entry in entries:
            entry.pins += 1

    def unpin(self, entries: Iterable[Entry]) -> None:
        """One copy or lookup less uses each of them."""
        for entry in entries:
            entry.pins -= 1
            if entry.expelled and not entry.pins:
                self.slots.free(entry.group, entry.slot)

    def expel(self, names: Iterable[bytes]) -> int:
        """How many of these pages were there, in host memory or on disk. From now on nobody finds them, after a restart
        neither; the place of one that is being copied is free when its copies have ended."""
        names = list(names)
        gone = sum(map(self.has, names))
        self._leave_host(names)
        if self.disk:
            self.disk.expel(names)
        return gone

    def discard(self, names: Iterable[bytes]) -> None:
        """Forgets pages that are of no use to anybody; the place of one that is being copied is free afterwards."""
        names = list(names)
        self._leave_host(names)
        for name in names if self.disk else ():
            self.disk.forget(name)

    def _leave_host(self, names: Iterable[bytes]) -> None:
        for name in names:
            if entry := self._entries.pop(name, None):
                entry.expelled = True
                if not entry.pins:
                    self.slots.free(entry.group, entry.slot)

    def drop(self, name: bytes) -> None:
        """Forgets the page in host memory; copies of it that are under way are the caller's affair."""
        entry = self._entries.pop(name)
        self.slots.free(entry.group, entry.slot)

    def write_down(self, name: bytes) -> None:
        """Puts a page of host memory on disk too."""
        entry = self._entries.get(name)
        if self.disk and entry and not self.disk.has(name):
            self.disk.write(name, self.memory(entry.group, entry.slot))

    def take_slot(self, group: int) -> int | None:
        """A slot, for which the least recently used pages that nobody uses may have to go; None when there is none."""
        while (slot := self.slots.take(group)) is None:
            name = next((n for n, entry in self._entries.items() if not entry.pins), None)
            if name is None:
                return None
            self.write_down(name)
            self.drop(name)
            self.gone["evict", "host: lru, its place was needed" + ("; on disk still" if self.has(name) else "")] += 1
        return slot

    @property
    def num_pages(self) -> int:
        """Pages in host memory and files on disk; a page that is in both counts twice."""
        return len(self._entries) + (self.disk.num_files if self.disk else 0)

    def __len__(self) -> int:
        return len(self._entries)
