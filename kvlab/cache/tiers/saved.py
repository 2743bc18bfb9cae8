"""Saved pages: by name, in host memory, on disk, or both; the least recently used go first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from kvlab.cache.tiers.slots import HostSlots


class Disk(Protocol):
    """The disk tier. It works on its own, in the order in which it is asked, and what it has done counts from `poll` on.
    Every failure of it is a miss: it never raises for one, and never returns wrong bytes.

    Attributes:
        gone: as `SavedPages.gone`, of files.
    """

    gone: Counter[tuple[str, str]]

    def has(self, name: bytes) -> bool:
        """Whether a file of that name is known; reading it may still fail."""

    def is_coming(self, name: bytes) -> bool:
        """Whether a file of that name is on its way."""

    def write(self, name: bytes, payload: memoryview, note: str = "") -> None:
        """Has a copy of the payload written."""

    def touch(self, name: bytes) -> None:
        """The file of that name, if one is known, is the last to go from now on."""

    def read(self, name: bytes, into: memoryview) -> Any:
        """A ticket for filling `into`, which nobody else uses until it has ended; what cannot be read is forgotten."""

    def result(self, ticket: Any) -> bool | None:
        """Whether a read gave exactly what was written; None as long as it is under way."""

    def wait(self, ticket: Any) -> None:
        """Returns once the read has ended."""

    def forget(self, name: bytes) -> None:
        """Has the file of that name deleted, if there is one; it is found no more."""

    def expel(self, names: Iterable[bytes]) -> None:
        """As `forget`, for files that no later process may find either, whoever wrote them: they are gone."""

    @property
    def num_files(self) -> int:
        """How many files are known."""

    def notes(self) -> list[tuple[bytes, str]]:
        """Name and note of every file that has a note."""

    def poll(self) -> None:
        """Takes over what was done."""

    def drain(self) -> None:
        """Returns once all that was asked is done."""

    def close(self) -> None:
        """As `drain`, and ends what works for it."""


@dataclass(eq=False)
class Entry:
    """A saved page in host memory.

    Attributes:
        pins: copies, reads and lookups that use it now.
        ready: its bytes are there. reading: they are on their way from the disk.
        fresh: they came from the disk, and went nowhere yet.
        expelled: nobody finds it any more; its place is free as soon as nobody uses it.
        failed: the disk did not have its bytes.
    """

    name: bytes
    group: int
    slot: int
    pins: int = 0
    ready: bool = True
    reading: bool = False
    fresh: bool = False
    expelled: bool = False
    failed: bool = False


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
        self._reads: list[tuple[Entry, Any]] = []

    def has(self, name: bytes) -> bool:
        """Whether the page is in host memory or on disk, or on its way to either."""
        disk = self.disk
        return name in self._entries or bool(disk and (disk.has(name) or disk.is_coming(name)))

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
        """As `entry`; what is only on disk is on its way from there from now on, `reading`."""
        entry = self.entry(name)
        if entry is None and self.disk and self.disk.has(name):
            slot = self.take_slot(group)
            if slot is None:
                return None
            entry = self._entries[name] = Entry(name, group, slot, 1, ready=False, reading=True, fresh=True)
            self._reads.append((entry, self.disk.read(name, self.memory(group, slot))))
        return entry

    @property
    def reading(self) -> bool:
        """Whether any page is on its way from the disk."""
        return bool(self._reads)

    def poll(self) -> None:
        """Takes over what the disk has done."""
        if not self.disk:
            return
        self.disk.poll()
        reads, self._reads = self._reads, []
        for entry, ticket in reads:
            done = self.disk.result(ticket)
            if done is None:
                self._reads.append((entry, ticket))
                continue
            entry.reading, entry.ready, entry.failed = False, done, not done
            if not done:
                # whatever the reason was, it is not looked for again
                self.disk.forget(entry.name)
                self._leave_host([entry.name] if self._entries.get(entry.name) is entry else [])
            self.unpin([entry])

    def wait(self) -> None:
        """Returns once no page is on its way from the disk."""
        for _, ticket in self._reads if self.disk else ():
            self.disk.wait(ticket)
        self.poll()

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
            self.gone["evict", f"host: lru, its place was needed{self._below(name)}"] += 1
        return slot

    def _below(self, name: bytes) -> str:
        if self.disk and self.disk.has(name):
            return "; on disk still"
        return "; on its way to disk" if self.disk and self.disk.is_coming(name) else ""

    @property
    def num_pages(self) -> int:
        """Pages in host memory and files on disk; a page that is in both counts twice."""
        return len(self._entries) + (self.disk.num_files if self.disk else 0)

    def __len__(self) -> int:
        return len(self._entries)
