"""A disk's thread that is late, or in no hurry to say that it is done; and one that has always done everything at once."""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import Future


class AtOnce:
    """A pool that does what it is asked there and then."""

    def submit(self, work, *arguments):
        future = Future()
        future.set_result(work(*arguments))
        return future


class LateDisk:
    """A pool that does a job after so many looks at it, a random number of them, or when somebody waits for it.

    Jobs are done in order, each with all before it, and no sooner: what is read too early, or written over before, shows.
    """

    def __init__(self, seed=0, most: int = 4) -> None:
        self._rng, self._most, self._open = random.Random(seed), most, deque()

    def submit(self, work, *arguments):
        job = LateJob(self, self._rng.randint(0, self._most), lambda: work(*arguments))
        self._open.append(job)
        return job

    def until(self, job) -> None:
        while job.found is None:
            first = self._open.popleft()
            first.found = first.work()


class LateJob:
    """As far as it is asked for, a future."""

    def __init__(self, pool: LateDisk, looks: int, work) -> None:
        self.pool, self.looks, self.work, self.found = pool, looks, work, None

    def done(self) -> bool:
        self.looks -= 1
        if self.looks < 0:
            self.pool.until(self)
        return self.found is not None

    def result(self):
        self.pool.until(self)
        return self.found
