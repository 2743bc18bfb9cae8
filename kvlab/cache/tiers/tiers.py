"""Parks, saves, finds and loads pages; pins what a copy under way reads or writes.

A copy takes time. Until it has ended, the pages it reads are pinned (`kvlab.cache.pins`), the slots it writes belong to
nobody else, and a request whose pages it writes does not run. `poll` looks which copies have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvlab.cache.manager import KVCacheManager
from kvlab.cache.pins import Page
from kvlab.cache.prefix import Hit
from kvlab.cache.tiers.ends import Placed
from kvlab.cache.tiers.finding import Finder, Found
from kvlab.cache.tiers.lookups import LookUps
from kvlab.cache.tiers.saved import Disk, Entry, SavedPages
from kvlab.cache.tiers.slots import HostSlots
from kvlab.cache.tiers.snapshot import Snapshot, restore, snapshot

Move = tuple[int, int, int]
"""(group, page, slot): a page to copy to its slot, or back."""


class Copier(Protocol):
    """Moves bytes between pages and slots, now or in the background, each call after those before it."""

    def start(self, moves: Sequence[Move], down: bool) -> Any:
        """A ticket for copying pages to slots (`down`), or back."""

    def done(self, ticket: Any) -> bool:
        """Whether the ticket's copies have ended."""

    def wait(self, ticket: Any) -> None:
        """Returns once they have."""

    def memory(self, group: int, slot: int) -> memoryview:
        """The bytes of a slot, to be read or written."""


@dataclass
class Parked:
    """A preempted request in host memory."""

    holdings: Snapshot
    slots: list[Page]


@dataclass
class Flight:
    """Copies under way. When they have ended, `pages` are unpinned and `landed` is called."""

    ticket: Any
    down: bool
    request_id: str
    pages: list[Page] = field(default_factory=list)
    landed: Callable[[], None] = lambda: None


class Tiers:
    """Host memory below the pool, and perhaps a disk below that.

    Args:
        cache: the pool's tables. slots: places in host memory. copier: who moves bytes. disk: the lowest tier.
        fingerprint: of model and storage; saved pages of another one are never found.
        saves: whether the prefixes of requests that end are saved.
        lossy: the storage format that parked pages are re-encoded to; "": they come back bit for bit.

    Attributes:
        lookups: what is found for waiting requests.
        on_gone: told by `poll` of saved pages that went: kind of event ("evict", "lost"), reason, how many.
    """

    def __init__(
        self, cache: KVCacheManager, slots: HostSlots, copier: Copier,
        disk: Disk | None = None, fingerprint: bytes = b"", saves: bool = True,
        lossy: str = "",
    ) -> None:  # fmt: skip
        self.cache, self.slots, self.copier, self.saves = cache, slots, copier, saves
        self.lossy = lossy
        self.saved = SavedPages(slots, copier.memory, disk)
        self.finder = Finder(cache, self.saved, fingerprint)
        self.lookups = LookUps(self.finder)
        if saves:
            cache.marks = self.finder.marks
        self._parked: dict[str, Parked] = {}
        self._reserved: dict[str, list[Page]] = {}
        self._flights: list[Flight] = []
        self.on_gone: Callable[[str, str, int], None] = lambda kind, reason, pages: None

    # copies under way

    @property
    def in_flight(self) -> bool:
        """Whether any copy, or read from disk, is under way."""
        return bool(self._flights) or self.saved.reading

    @property
    def pages_coming(self) -> int:
        """Pages that come free when the copies that read them end."""
        return self.cache.pins.last_holds

    def loading(self, request_id: str) -> bool:
        """Whether the request's pages are being written."""
        return any(f.request_id == request_id and not f.down for f in self._flights)

    def leaving(self, request_id: str) -> bool:
        """Whether the request's pages are still being read on their way down."""
        return any(f.request_id == request_id and f.down for f in self._flights)

    def poll(self) -> None:
        """Settles the copies and reads that have ended, and tells what went since the last time."""
        self.saved.poll()
        for flight in [f for f in self._flights if self.copier.done(f.ticket)]:
            self._settle(flight)
        disk = self.saved.disk
        for gone in (self.saved.gone, disk.gone) if disk else (self.saved.gone,):
            for (kind, reason), pages in gone.items():
                self.on_gone(kind, reason, pages)
            gone.clear()

    def wait(self) -> None:
        """Waits for every copy and every read from disk under way; not for what is being written there."""
        for flight in self._flights:
            self.copier.wait(flight.ticket)
        self.saved.wait()
        self.poll()

    def drain(self) -> None:
        """Waits until all that was saved lies where it belongs, the disk included."""
        self.wait()
        if self.saved.disk:
            self.saved.disk.drain()
        self.poll()

    def close(self) -> None:
        """As `drain`, and ends what works for the tiers."""
        try:
            self.drain()
        finally:
            if self.saved.disk:
                self.saved.disk.close()

    def _fly(self, moves: list[Move], flight: Flight) -> None:
        flight.ticket = self.copier.start(moves, flight.down)
        self._flights.append(flight)
        if self.copier.done(flight.ticket):
            self._settle(flight)

    def _settle(self, flight: Flight) -> None:
        self._flights.remove(flight)
        self.cache.pins.unpin(flight.pages)
        flight.landed()

    # preempted requests

    def bytes_of(self, request_id: str) -> int:
        """Bytes of the pages that the request would take along."""
        return sum(self.slots.page_bytes[g] for g, _ in snapshot(self.cache, request_id)[1])

    def make_room(self, request_id: str) -> bool:
        """Whether host memory now has places for the request, which `park` takes; saved pages make way."""
        taken: list[Page] = []
        for group, _ in snapshot(self.cache, request_id)[1]:
            slot = self.saved.take_slot(group)
            if slot is None:
                self._free_slots(taken)
                return False
            taken.append((group, slot))
        self._reserved[request_id] = taken
        return True

    def park(self, request_id: str) -> tuple[int, int]:
        """(pages, bytes) of the request that move to host memory; it holds no page of the pool any more."""
        holdings, pages = snapshot(self.cache, request_id)
        slots = self._reserved.pop(request_id)
        self._parked[request_id] = Parked(holdings, slots)
        self.cache.pins.pin(pages)
        self.cache.free(request_id)
        moves = [(g, page, slot) for (g, page), (_, slot) in zip(pages, slots, strict=True)]
        self._fly(moves, Flight(None, True, request_id, pages))
        return len(pages), sum(self.slots.page_bytes[g] for g, _ in slots)

    def parked(self, request_id: str) -> bool:
        """Whether the request's pages are here."""
        return request_id in self._parked

    def unpark(self, request_id: str) -> tuple[int, int]:
        """(pages, bytes) of the request on their way back into the pool, where it holds new pages for them."""
        parked = self._parked.pop(request_id)
        pages = restore(self.cache, request_id, parked.holdings)
        moves = [(g, page, slot) for (g, page), (_, slot) in zip(pages, parked.slots, strict=True)]
        landed = lambda: self._free_slots(parked.slots)  # noqa: E731
        self._fly(moves, Flight(None, False, request_id, landed=landed))
        return len(pages), sum(self.slots.page_bytes[g] for g, _ in parked.slots)

    def forget(self, request_id: str) -> None:
        """Gives up what is here of a request that ends or starts over; copies under way keep what they need."""
        self.lookups.let_go(request_id)
        if self.finder.marks:
            self.finder.marks.forget(request_id)
        parked = self._parked.pop(request_id, None)
        if parked:
            flight = next((f for f in self._flights if f.request_id == request_id and f.down), None)
            if flight is None:
                self._free_slots(parked.slots)
            else:
                flight.landed = lambda: self._free_slots(parked.slots)
        for flight in self._flights:
            if flight.request_id == request_id and not flight.down and not flight.pages:
                # its pages are being written: they must not become another's before that ends
                flight.pages = [
                    (g, page) for g, table in enumerate(self.cache.tables.get(request_id, ())) for page in table if page
                ] + list(self.cache.kept.pages(request_id))
                self.cache.pins.pin(flight.pages)

    def _free_slots(self, slots: list[Page]) -> None:
        for group, slot in slots:
            self.slots.free(group, slot)

    # saved prefixes

    def save(self, request) -> tuple[int, int] | None:
        """(pages, bytes) of a request that ends which are copied down for later ones; None when nothing new is."""
        if not self.saves:
            return None
        return self._save(self.finder.to_save(request))

    def save_checkpoint(self, request) -> tuple[int, int] | None:
        """As `save`, for a request that goes on, at the length that it has just reached; before `KVCacheManager.advance`
        is told of it. What is copied is written by nobody meanwhile: full pages, and copies of states."""
        return self._save(self.finder.checkpoint_to_save(request)) if self.saves else None

    def _save(self, new: list[Placed]) -> tuple[int, int] | None:
        if not new:
            return None
        pages = [(entry.group, page) for entry, page in new]
        self.cache.pins.pin(pages)
        moves = [(entry.group, page, entry.slot) for entry, page in new]
        self._fly(moves, Flight(None, True, "", pages, lambda: self._arrived([entry for entry, _ in new])))
        return len(pages), sum(self.slots.page_bytes[g] for g, _ in pages)

    def _arrived(self, entries: list[Entry]) -> None:
        for entry in entries:
            self.saved.arrived(entry)

    def expel(self, request) -> int:
        """How many saved pages nobody finds any more: all that the request could have read, see `Finder.expel`."""
        return self.finder.expel(request)

    def find(self, request, above: int = 0) -> Found | None:
        """Saved tokens of the request's beginning, all in host memory and pinned there; None when the pool's `above`
        tokens are as many. Where pages are saved one by one, those of the first `above` tokens are left where they are.
        Waits for what is on its way from the disk; `lookups.start` says beforehand whether anything is.
        """
        return self.lookups.take(request, above)

    def release(self, found: Found) -> None:
        """Lets go of what was found."""
        self.saved.unpin(found.entries)

    def bytes_in(self, entries: Sequence[Entry]) -> int:
        """Bytes of saved pages."""
        return sum(self.slots.page_bytes[entry.group] for entry in entries)

    def load(self, request_id: str, found: Found, hit: Hit | None = None) -> None:
        """Sends what was found on its way into the pool, where the request holds new pages for it, behind those of its
        `hit` where it was looked for behind them."""
        pages = self._behind(request_id, found, hit) if found.start else restore(self.cache, request_id, found.holdings)
        moves = [(g, page, entry.slot) for (g, page), entry in zip(pages, found.entries, strict=True)]
        for entry in found.entries:
            entry.fresh = False
        self._fly(moves, Flight(None, False, request_id, landed=lambda: self.saved.unpin(found.entries)))

    def _behind(self, request_id: str, found: Found, hit: Hit | None) -> list[Page]:
        assert hit and hit.tokens == found.start, f"request {request_id}: looked up behind another hit"
        taken = self.cache.allocate(request_id, found.tokens, hit=hit)
        assert taken, f"request {request_id} was admitted without room for what was found"
        self.cache.computed[request_id] = found.tokens
        tables = self.cache.tables[request_id]
        return [(g, tables[g][i]) for g, (_, held) in enumerate(found.holdings.tables) for i in held]
