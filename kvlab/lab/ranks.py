"""Two ranks, each a process with a scheduler and block tables of its own, told the same events: do their tables agree?

`python -m kvlab.lab.ranks` is one rank: a JSON message a line on stdin, its answer on stdout. Under tensor parallelism
every rank holds its heads of the same tokens in the same pages; a rank that missed an event computes on other tokens.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

from kvlab.cache import KVCacheManager
from kvlab.schedule import Limits, Request, SamplingParams, Scheduler
from kvlab.specs.families import from_config
from kvlab.specs.layout import group_parts

SHAPE = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 32,
}  # fmt: skip
PAGE, PAGES, SAMPLED = 4, 32, 7

Message = dict[str, Any]


def add(name: str, prompt: int, new: int) -> Message:
    """The message that a request of `prompt` tokens arrives and gets `new` more."""
    return {"do": "add", "id": name, "prompt": prompt, "new": new}


def abort(name: str) -> Message:
    """The message that a request is given up."""
    return {"do": "abort", "id": name}


STEP: Message = {"do": "step"}


class RankState:
    """A scheduler over block tables, without a model: every request gets the same token, so events alone decide."""

    def __init__(self) -> None:
        groups = group_parts(from_config(SHAPE), PAGE)
        self.cache = KVCacheManager(groups, [PAGES] * len(groups), 16)
        self.scheduler = Scheduler(self.cache, Limits(8, 16, 64))
        self.time = 0.0

    def take(self, message: Message) -> Message:
        """What the rank says after one message: the digest of its tables, their pages, and the step's tokens."""
        self.time += 1
        batch: list[tuple[str, int]] = []
        if message["do"] == "add":
            params = SamplingParams(max_tokens=message["new"])
            self.scheduler.add(Request(message["id"], [1] * message["prompt"], params), self.time)
        elif message["do"] == "abort":
            self.scheduler.abort(message["id"], self.time)
        elif self.scheduler.has_work:
            step = self.scheduler.schedule(self.time)
            batch = [(chunk.request.request_id, chunk.count) for chunk in step.chunks]
            self.scheduler.update(step, [SAMPLED] * len(step.sampling), self.time)
        return {"digest": digest(self.cache), "tables": tables(self.cache), "batch": batch}


def tables(cache: KVCacheManager) -> dict[str, list[list[int]]]:
    """Every live request's page ids, by group."""
    return {name: [list(table) for table in found] for name, found in sorted(cache.tables.items())}


def digest(cache: KVCacheManager) -> str:
    """Sixteen letters that stand for all tables: what ranks can afford to compare in every step."""
    return hashlib.sha256(json.dumps(tables(cache), sort_keys=True).encode()).hexdigest()[:16]


class Rank:
    """A rank in a process of its own; use it in a `with` block."""

    def __enter__(self) -> Rank:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvlab.lab.ranks"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._process.communicate()

    def tell(self, message: Message) -> Message:
        """The rank's answer to a message.

        Raises:
            RuntimeError: the process ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"rank: its process ended with {self._process.wait()} after {message}")
        return json.loads(answer)


@dataclass(frozen=True)
class Compared:
    """What two ranks said after the `number`-th message, the second one's answer the older one where it missed it."""

    number: int
    message: Message
    answers: tuple[Message, Message]

    @property
    def agree(self) -> bool:
        """Whether the digests of all tables are equal."""
        return self.answers[0]["digest"] == self.answers[1]["digest"]

    @property
    def same_batch(self) -> bool:
        """Whether both compute the same tokens in this step; where not, a collective waits or mixes rows."""
        return self.answers[0]["batch"] == self.answers[1]["batch"]

    @property
    def differing(self) -> list[str]:
        """The requests whose tables differ."""
        first, second = (answer["tables"] for answer in self.answers)
        return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def run_ranks(messages: Sequence[Message], missed: int | None = None) -> list[Compared]:
    """Both ranks' answers to every message; the `missed`-th one does not reach the second rank."""
    with Rank() as first, Rank() as second:
        found, last = [], {"digest": "", "tables": {}, "batch": []}
        for i, message in enumerate(messages):
            answer = first.tell(message)
            last = last | {"batch": []} if i == missed else second.tell(message)
            found.append(Compared(i, message, (answer, last)))
    return found


def serve(source: TextIO, out: TextIO) -> None:
    """Answers each line of `source` until it ends."""
    state = RankState()
    for line in source:
        out.write(json.dumps(state.take(json.loads(line))) + "\n")
        out.flush()


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
