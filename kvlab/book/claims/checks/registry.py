"""The checks by name, and what one returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Value:
    """A computed number.

    Attributes:
        number: in base units: bytes, tokens, seconds, or plain.
        text: for people, with its units.
        other_readings: the number under the other conventions a writer may have meant, such as k = 1,000 tokens.
        brief: the text inside a ratio or a comparison; the text itself when empty.
    """

    number: float
    text: str
    other_readings: tuple[float, ...] = ()
    brief: str = ""

    @property
    def short(self) -> str:
        """The shortest text that names the number."""
        return self.brief or self.text


CHECKS: dict[str, Callable[..., Value]] = {}


def check(function: Callable[..., Value]) -> Callable[..., Value]:
    """Registers a function that claims may call by name."""
    CHECKS[function.__name__] = function
    return function


def run(row: dict[str, Any]) -> Value:
    """The value of one check row.

    Raises:
        ValueError: no such check, or arguments it does not take.
    """
    name = row.get("call")
    if name not in CHECKS:
        raise ValueError(f"check {name!r}: must be one of {', '.join(CHECKS)}")
    try:
        return CHECKS[name](**{key: value for key, value in row.items() if key != "call"})
    except TypeError as error:
        raise ValueError(f"check {describe(row)}: {error}") from None


def describe(row: dict[str, Any]) -> str:
    """The call as it is written: "bytes_per_token(model='llama-3-70b')"."""
    return f"{row['call']}({', '.join(f'{k}={_shown(v)}' for k, v in row.items() if k != 'call')})"


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "call" in value:
        return describe(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value)
