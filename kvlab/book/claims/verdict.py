"""From a stated figure and a computed one to a verdict, by one rule for every claim.

A figure is stated to the digits it is printed with: "10.5 GB" means 10.45 to 10.55, and "~70 KB", which says that its
zero is not exact, 65 to 75. If the computed value falls in that range it is reproduced; if it does only under another
reading of the units (KiB for KB, k = 1,000 tokens) it is reproduced with a note; within a tenth it is imprecise; else
wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

VERDICTS = (
    "reproduced", "reproduced-with-unit-note", "imprecise", "wrong", "contradicts-other-source", "not-checkable-here",
)  # fmt: skip

_BINARY = {"KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_PLAIN = {
    "": 1, "B": 1, "x": 1, "tokens": 1, "layers": 1, "heads": 1, "requests": 1, "%": 0.01,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
    "M": 10**6, "billion": 10**9, "trillion": 10**12, "words": 1,
    "us": 1e-6, "ms": 1e-3, "s": 1, "min": 60,
}  # fmt: skip
_FIGURE = r"\d[\d,]*(?:\.\d+)?"


@dataclass(frozen=True)
class Stated:
    """A figure as printed: its lowest and highest reading in `unit`, and the unit."""

    low: float
    high: float
    unit: str
    text: str


def parse(text: str) -> Stated:
    """The range a printed figure stands for: "10.5 GB", "~70 KB", "7-8 requests", "2x".

    Raises:
        ValueError: not a number with a known unit.
    """
    match = re.fullmatch(rf"~?\s*({_FIGURE})(?:\s*-\s*({_FIGURE}))?\s*([A-Za-z%]*)", text.strip())
    unit = match.group(3) if match else ""
    if not match or unit not in _PLAIN | _DECIMAL:
        raise ValueError(f"stated {text!r}: must be a number, or a range, with one of {', '.join(_PLAIN | _DECIMAL)}")
    first, last = match.group(1), match.group(2) or match.group(1)
    about = text.strip().startswith("~")
    return Stated(_number(first) - _half(first, about), _number(last) + _half(last, about), unit, text)


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _half(text: str, about: bool) -> float:
    """Half a unit of the last printed digit; trailing zeros of a whole number count as printed unless it is "about"."""
    _, _, decimals = text.partition(".")
    digits = text.replace(",", "")
    zeros = len(digits) - len(digits.rstrip("0")) if about and not decimals and _number(text) else 0
    return 0.5 * 10.0 ** (zeros - len(decimals))


def judge(stated: Stated, computed: float, other_readings: tuple[float, ...] = ()) -> str:
    """The verdict on `stated`, given the value in base units and its values under other unit conventions."""
    decimal = _DECIMAL.get(stated.unit) or _PLAIN[stated.unit]
    if _within(stated, computed / decimal):
        return "reproduced"
    binary = _BINARY.get(stated.unit, decimal)
    if any(_within(stated, v / u) for v in (computed, *other_readings) for u in (binary, decimal)):
        return "reproduced-with-unit-note"
    middle = (stated.low + stated.high) / 2 * decimal
    return "imprecise" if abs(computed - middle) <= 0.1 * abs(computed) else "wrong"


def worst(verdicts: list[str]) -> str:
    """The verdict on a claim that states several figures."""
    order = ("reproduced", "reproduced-with-unit-note", "imprecise", "wrong")
    return max(verdicts, key=order.index)


def _within(stated: Stated, value: float) -> bool:
    slack = 1e-9 * abs(value)
    return stated.low - slack <= value <= stated.high + slack
