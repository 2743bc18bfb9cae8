"""The waiting requests, in the order of the policy."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator

from kvlab.schedule.policy import SchedulingPolicy
from kvlab.schedule.request import Request

LOOK_AHEAD = 64
"""Waiting requests that "longest_prefix" looks at: each look costs a match of a prompt."""


class WaitingQueue:
    """Waiting requests; iterated in order. Under "longest_prefix" the order is that of arrival, and `head` may pick
    one further back."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.policy = policy
        self._requests: list[Request] = []
        # how often the first of the queue was passed over
        self._passed = 0

    def push(self, request: Request) -> None:
        """Puts the request where it belongs."""
        if not self._requests or self._key(self._requests[0]) > self._key(request):
            self._passed = 0
        insort(self._requests, request, key=self._key)

    def head(self, hit: Callable[[Request], int]) -> Request:
        """The request that is next; `hit` counts the tokens of a request that the cache has."""
        first = self._requests[0]
        if self.policy.order != "longest_prefix" or first.preemptions or self._passed >= self.policy.patience:
            return first
        return max(self._requests[:LOOK_AHEAD], key=lambda r: (hit(r), -r.number))

    def take(self, request: Request) -> None:
        """Removes a request that is admitted."""
        self._passed = 0 if request is self._requests[0] else self._passed + 1
        self._requests.remove(request)

    def remove(self, request: Request) -> None:
        """Removes a request that ended."""
        if request is self._requests[0]:
            self._passed = 0
        self._requests.remove(request)

    def _key(self, request: Request) -> tuple[int, int]:
        if self.policy.order == "priority":
            return request.priority, request.number
        return (0 if request.preemptions or self.policy.order == "fcfs" else 1), request.number

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def __contains__(self, request: object) -> bool:
        return request in self._requests
