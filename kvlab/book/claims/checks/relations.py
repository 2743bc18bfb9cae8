"""Checks that relate other checks: a ratio, a difference, a comparison. The only arithmetic the ledger has."""

from __future__ import annotations

from typing import Any

from kvlab.book.claims.checks.registry import Value, check, run
from kvlab.specs.units import gb, gib

Check = dict[str, Any]


@check
def ratio(of: Check, to: Check) -> Value:
    """One check's number divided by another's."""
    top, bottom = run(of), run(to)
    others = tuple(a / b for a, b in zip(top.other_readings, bottom.other_readings, strict=False))
    number = top.number / bottom.number
    shown = f"{number:,.0f}" if number >= 1000 else f"{number:,.3g}"
    return Value(number, f"{top.short} / {bottom.short} = {shown}", others)


@check
def saved(of: Check, to: Check) -> Value:
    """The share by which one check's number is smaller than another's."""
    top, bottom = run(of), run(to)
    number = 1 - top.number / bottom.number
    return Value(number, f"{top.short} is {100 * number:,.1f} % less than {bottom.short}")


@check
def excess(of: Check, to: Check) -> Value:
    """The share by which one check's number is larger than another's."""
    top, bottom = run(of), run(to)
    number = top.number / bottom.number - 1
    shown = f"{100 * number:,.1f}" if number >= 0.001 else f"{100 * number:,.2g}"
    return Value(number, f"{top.short} is {shown} % more than {bottom.short}")


@check
def share(of: Check, to: Check) -> Value:
    """One check's number as a share of another's."""
    top, bottom = run(of), run(to)
    number = top.number / bottom.number
    shown = f"{100 * number:,.1f}" if number >= 0.001 else f"{100 * number:,.2g}"
    return Value(number, f"{top.short} is {shown} % of {bottom.short}", brief=f"{shown} %")


@check
def remainder(of: Check, less: list[Check]) -> Value:
    """Bytes of one check without those of others."""
    whole, taken = run(of), [run(row) for row in less]
    number = int(whole.number - sum(value.number for value in taken))
    terms = " - ".join(gb(int(value.number)) for value in (whole, *taken))
    return Value(number, f"{terms} = {gb(number)} = {gib(number)}")


@check
def total(of: list[Check]) -> Value:
    """Bytes of several checks together."""
    parts = [run(row) for row in of]
    number = int(sum(part.number for part in parts))
    others = tuple(sum(readings) for readings in zip(*(part.other_readings for part in parts), strict=False))
    terms = " + ".join(gb(int(part.number)) for part in parts)
    also = f"; {gb(int(others[0]))} with k = 1,000" if others and others[0] != number else ""
    return Value(number, f"{terms} = {gb(number)} = {gib(number)}{also}", others, gb(number))


@check
def exceeds(of: Check, to: Check) -> Value:
    """1 when the first check's number is larger than the second's, else 0."""
    top, bottom = run(of), run(to)
    number = float(top.number > bottom.number)
    return Value(number, f"{top.short} {'>' if number else '<='} {bottom.short}")


@check
def equals(of: Check, to: Check) -> Value:
    """1 when two checks give the same number, else 0."""
    left, right = run(of), run(to)
    number = float(left.number == right.number)
    return Value(number, f"{left.short} {'is' if number else 'is not'} {right.short}")
