"""Settings that a page sends as JSON: over defaults, by name, whole numbers within their range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def over_defaults(defaults: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` over `defaults`.

    Raises:
        ValueError: a name that `defaults` does not have.
    """
    for name in settings:
        if name not in defaults:
            raise ValueError(f"setting {name!r}: must be one of {', '.join(defaults)}")
    return {**defaults, **settings}


def whole_number(name: str, value: Any, low: int, high: int) -> int:
    """`value`, when it is a whole number from `low` to `high`.

    Raises:
        ValueError: it is not; the message has its name.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} {value!r}: must be a whole number from {low} to {high}")
    return value
