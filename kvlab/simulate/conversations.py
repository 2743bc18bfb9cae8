"""ShareGPT's own JSON: an array of conversations, or one a line; a request is a conversation's first question.

    [{"id": "...", "conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]}, ...]

Lengths are those of the texts in tokens, so a tokenizer must count. There are no arrival times, and nothing is shared.
Source: vLLM's benchmarks/datasets takes the first two turns of a conversation too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvlab.simulate.traces import TraceRequest

ASKING, ANSWERING = ("human", "user"), ("gpt", "chatgpt", "assistant", "bing", "bard")

Count = Callable[[str], int]
"""Tokens of a text."""


class Conversations:
    """Rows of conversations.

    Args:
        count: tokens of a text; None refuses the file.
    """

    block_tokens = 512

    def __init__(self, count: Count | None = None) -> None:
        self._count = count

    def rows(self, first: str, rest: Iterable[str], name: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """(number, conversation) of each."""
        if self._count is None:
            raise ValueError(f"{name}: holds texts, and a tokenizer must count their tokens: give one")
        lines = itertools.chain([first], rest)
        # an array is one value however many lines it has
        values = ["".join(lines)] if first.lstrip().startswith("[") else (line for line in lines if line.strip())
        found: Iterable[Any] = (_value(text, name, number) for number, text in enumerate(values, 1))
        if first.lstrip().startswith("["):
            found = itertools.chain.from_iterable(found)
        for number, row in enumerate(found, 1):
            if not isinstance(row, dict) or not isinstance(row.get("conversations"), list):
                raise ValueError(f"{name}, row {number}: must be an object with a list of conversations")
            yield number, row

    def skip(self, row: dict[str, Any]) -> str:
        """Why the row is left out; "" when it is not."""
        texts = _first_exchange(row["conversations"])
        return "" if texts and all(text.strip() for text in texts) else "no question with an answer"

    def request(self, row: dict[str, Any]) -> TraceRequest:
        """The request of a row."""
        assert self._count is not None
        question, answer = _first_exchange(row["conversations"])
        return TraceRequest(0.0, self._count(question), self._count(answer))


def _value(text: str, name: str, number: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}, row {number}: not JSON ({error})") from None
    except RecursionError:
        raise ValueError(f"{name}, row {number}: not JSON of conversations (nested too deep)") from None


def _first_exchange(turns: list[Any]) -> tuple[str, ...]:
    """(first question, its answer); () where no question is followed by an answer."""
    said = [(t.get("from"), t.get("value")) for t in turns if isinstance(t, dict)]
    for (who, question), (then, answer) in itertools.pairwise(said):
        if who in ASKING and then in ANSWERING and isinstance(question, str) and isinstance(answer, str):
            return question, answer
    return ()
