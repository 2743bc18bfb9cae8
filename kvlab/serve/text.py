"""From tokens to text, and where a stop string cuts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopText:
    """Text handed out as far as no stop string may still begin in it.

    Attributes:
        stopped: whether a stop string came; the text ends before it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str, last: bool = False) -> str:
        """What may be shown now that `text` came; with `last` all that is left."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = 0 if last else self._open_end()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def _open_end(self) -> int:
        """Characters at the end that begin a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0


class TextOf:
    """The text of one completion, token by token.

    Args:
        tokenizer: the model's, or None: the text is empty then.
        stops: strings that end it.

    Attributes:
        token_ids: so far.
        text: shown so far.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._decoder = None if tokenizer is None else tokenizer.stream()
        self._stop = StopText(stops)
        self.token_ids: list[int] = []
        self.text = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string came."""
        return self._stop.stopped

    def push(self, token_ids: Sequence[int], last: bool) -> str:
        """The text that `token_ids` complete; with `last` all that was held back too."""
        self.token_ids.extend(token_ids)
        if self._decoder is None:
            return ""
        fresh = "".join(map(self._decoder.push, token_ids)) + (self._decoder.finish() if last else "")
        shown = self._stop.push(fresh, last)
        self.text += shown
        return shown
