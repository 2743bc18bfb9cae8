"""What was found for waiting requests, while some of it is still on its way from the disk.

A look-up starts the reads, and the request goes on waiting; others run meanwhile. What was found is pinned in host
memory, so it is there when the reads have ended. Where one of them failed, what is left is looked up anew.
"""

from __future__ import annotations

from kvlab.cache.tiers.finding import Finder, Found


class LookUps:
    """The look-ups of all waiting requests.

    Attributes:
        lost: saved pages that a look-up counted on and the disk did not have: reason, how many; who tells of them takes
            them out.
    """

    def __init__(self, finder: Finder) -> None:
        self.finder, self.saved = finder, finder.saved
        self.lost: list[tuple[str, int]] = []
        # by request: tokens of the pool that it was looked up behind, and what was found
        self._found: dict[str, tuple[int, Found | None]] = {}

    def start(self, request, above: int = 0) -> bool:
        """Whether pages of what was found of the request's beginning, beyond the `above` tokens of the pool, are still on
        their way from the disk; `take` has it afterwards."""
        name = request.request_id
        while True:
            if name not in self._found:
                self._found[name] = above, self.finder.find(request, above)
            before, found = self._found[name]
            reading = bool(found and found.reading)
            if before == above and (reading or not (found and found.broken)):
                return reading
            # what cannot be read is forgotten, so this ends
            self._tell(found)
            self.let_go(name)

    def take(self, request, above: int = 0) -> Found | None:
        """What was found, pinned and in host memory; waits for what is on its way from the disk."""
        while self.start(request, above):
            self.saved.wait()
        return self._found.pop(request.request_id)[1]

    def let_go(self, request_id: str) -> None:
        """Lets go of what was found for the request."""
        _, found = self._found.pop(request_id, (0, None))
        if found:
            self.saved.unpin(found.entries)

    def rest(self, request_id: str) -> None:
        """Lets go of what was found for a request that cannot run yet, unless it is still being read: others need the
        memory meanwhile, and what is still there is found again."""
        _, found = self._found.get(request_id, (0, None))
        if not (found and found.reading):
            self.let_go(request_id)

    def _tell(self, found: Found | None) -> None:
        for g, group in enumerate(self.finder.cache.groups):
            bad = {id(entry) for entry in found.entries if entry.failed and entry.group == g} if found else ()
            if bad:
                self.lost.append((f"saved page of group {group.name} cannot be read", len(bad)))
