"""Copies that end late, as on a busy device."""

from __future__ import annotations


class LateCopier:
    """Copies that end after so many looks at them, or with None only when somebody waits for them.

    Bytes move when a copy ends and no sooner, in the order in which copies began: what is changed before that, read too
    early or given to another meanwhile shows in somebody's tokens.
    """

    def __init__(self, copier, looks: int | None = None) -> None:
        self._copier, self._looks, self._open = copier, looks, []

    def start(self, moves, down):
        self._open.append([self._looks, list(moves), down])
        return self._open[-1]

    def done(self, ticket):
        if self._is_open(ticket) and ticket[0] is not None:
            ticket[0] -= 1
            if ticket[0] < 0:
                self.wait(ticket)
        return not self._is_open(ticket)

    def wait(self, ticket):
        while self._is_open(ticket):
            _, moves, down = self._open.pop(0)
            self._copier.start(moves, down)

    def memory(self, group, slot):
        return self._copier.memory(group, slot)

    def _is_open(self, ticket):
        return any(ticket is other for other in self._open)
