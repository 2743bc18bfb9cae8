"""The host tier's places for pages. Groups have pages of different size, so they cut them from units that all share."""

from __future__ import annotations

from kvlab.cache.pool import BlockPool
from kvlab.cache.sectors import SectorPages
from kvlab.specs.pools import PoolLayout


class HostSlots:
    """Slots for one page each. A unit serves one group at a time.

    Args:
        layout: of the pool whose pages are kept here.
        host_bytes: of the host memory.
        unit_bytes: of a unit; None: of the largest page.

    Raises:
        ValueError: no unit fits.
    """

    def __init__(self, layout: PoolLayout, host_bytes: int, unit_bytes: int | None = None) -> None:
        self.page_bytes = [layout.page_bytes(g) for g in range(len(layout.groups))]
        self.unit_bytes = unit_bytes or max(self.page_bytes)
        count = host_bytes // self.unit_bytes
        if count < 1:
            raise ValueError(f"host_bytes {host_bytes}: must hold a unit of {self.unit_bytes} bytes")
        self._units = BlockPool(count + 1)
        self._slots = [SectorPages(self._units, self.unit_bytes // size) for size in self.page_bytes]

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all units."""
        return (self._units.num_blocks - 1) * self.unit_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the pages that lie in slots."""
        return sum(s.num_held * size for s, size in zip(self._slots, self.page_bytes, strict=True))

    def take(self, group: int) -> int | None:
        """A free slot for a page of that group, None when there is none."""
        slots = self._slots[group]
        return slots.allocate(1)[0] if slots.num_free else None

    def free(self, group: int, slot: int) -> None:
        """Gives a slot back."""
        self._slots[group].free([slot])

    def offset(self, group: int, slot: int) -> int:
        """The first byte of a slot in the host memory."""
        unit, place = divmod(slot, self.unit_bytes // self.page_bytes[group])
        return (unit - 1) * self.unit_bytes + place * self.page_bytes[group]
