"""The host tier's bytes, and the copies between them and the pool: at once on the CPU, in the background on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.cache.tiers import HostSlots
from kvlab.cache.tiers.tiers import Move
from kvlab.engine.storage import PagedStorage

BATCH_PAGES = 64
"""Pages that one staging buffer on the device takes at a time."""


@dataclass
class Ticket:
    """Copies under way; no event: they have ended."""

    event: torch.cuda.Event | None = None
    num_bytes: int = 0


class HostMemory:
    """One buffer of host memory, pinned on CUDA, and who copies pages to and from it.

    On CUDA copies run on a stream of their own. A copy begins after everything that is queued on the compute stream,
    so it reads pages that are complete and writes none that is still read; the caller keeps its pages from being used
    until the ticket is done.

    Args:
        storage: the pool. slots: where each page lies in the buffer.
    """

    def __init__(self, storage: PagedStorage, slots: HostSlots) -> None:
        self.storage, self.slots = storage, slots
        self.device = next(iter(storage.buffers.values())).device
        on_cuda = self.device.type == "cuda"
        self.buffer = torch.empty(slots.capacity_bytes, dtype=torch.uint8, pin_memory=on_cuda)
        self._stream = torch.cuda.Stream(self.device) if on_cuda else None
        self._bytes = memoryview(self.buffer.numpy())

    def memory(self, group: int, slot: int) -> memoryview:
        """The bytes of a slot."""
        start = self.slots.offset(group, slot)
        return self._bytes[start : start + self.slots.page_bytes[group]]

    def start(self, moves: Sequence[Move], down: bool) -> Ticket:
        """A ticket for copying pages to slots (`down`), or back."""
        num_bytes = sum(self.slots.page_bytes[g] for g, _, _ in moves)
        if self._stream is None:
            self._copy(moves, down)
            return Ticket(None, num_bytes)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._copy(moves, down)
            event = torch.cuda.Event()
            event.record(self._stream)
        return Ticket(event, num_bytes)

    def done(self, ticket: Ticket) -> bool:
        """Whether the ticket's copies have ended."""
        return ticket.event is None or ticket.event.query()

    def wait(self, ticket: Ticket) -> None:
        """Returns once they have."""
        if ticket.event is not None:
            ticket.event.synchronize()

    def _copy(self, moves: Sequence[Move], down: bool) -> None:
        for group in sorted({g for g, _, _ in moves}):
            own = [(page, slot) for g, page, slot in moves if g == group]
            if self._stream is None:
                self._copy_here(group, own, down)
                continue
            for i in range(0, len(own), BATCH_PAGES):
                pages, slots = zip(*own[i : i + BATCH_PAGES], strict=True)
                (self._down if down else self._up)(group, pages, slots)

    def _copy_here(self, group: int, moves: Sequence[tuple[int, int]], down: bool) -> None:
        """Copies where the pool is host memory too: for each layer, runs of pages whose places follow one another."""
        size = self.slots.page_bytes[group]
        for page, offset, count in self._runs(group, moves):
            start = 0
            for rows in self.storage.rows(group):
                width, own = rows.shape[1], rows.narrow(0, page, count)
                place = self.buffer.as_strided((count, width), (size, 1), offset + start)
                (place if down else own).copy_(own if down else place)
                start += width

    def _runs(self, group: int, moves: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """(first page, its place in the buffer, how many) of pages that lie side by side here and there."""
        runs: list[tuple[int, int, int]] = []
        size = self.slots.page_bytes[group]
        for page, slot in sorted(moves):
            offset = self.slots.offset(group, slot)
            if runs and (page, offset) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2] * size):
                runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
            else:
                runs.append((page, offset, 1))
        return runs

    def _down(self, group: int, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Gathers a page's bytes from the buffers of all layers on the device, then sends each page in one piece."""
        index = torch.tensor(pages, device=self.device)
        staged = torch.cat([rows.index_select(0, index) for rows in self.storage.rows(group)], dim=1)
        for page, slot in zip(staged, slots, strict=True):
            self._slot(group, slot).copy_(page, non_blocking=True)

    def _up(self, group: int, pages: Sequence[int], slots: Sequence[int]) -> None:
        """The way back: each page in one piece into a buffer on the device, from there to all layers."""
        staged = torch.empty(len(pages), self.slots.page_bytes[group], dtype=torch.uint8, device=self.device)
        for page, slot in zip(staged, slots, strict=True):
            page.copy_(self._slot(group, slot), non_blocking=True)
        index, start = torch.tensor(pages, device=self.device), 0
        for rows in self.storage.rows(group):
            rows.index_copy_(0, index, staged[:, start : start + rows.shape[1]])
            start += rows.shape[1]

    def _slot(self, group: int, slot: int) -> Tensor:
        return self.buffer.narrow(0, self.slots.offset(group, slot), self.slots.page_bytes[group])
