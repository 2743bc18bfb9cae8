"""Dates of the works a history of the KV cache names. A month is read from an arXiv number, never typed.

arXiv numbers a paper by the year and month of its first version: 2309.06180 is from September 2023.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

_FILE = Path(__file__).with_name("history.json")


@dataclass(frozen=True)
class Work:
    """One work: its first version, the months in which the guide places it, and the factor it changes.

    Months count from year 0: 12 x year + month - 1.
    """

    name: str
    arxiv: str
    guide_first: int
    guide_last: int
    changes: str

    @property
    def month(self) -> int:
        """Month of the first version."""
        return arxiv_month(self.arxiv)

    @property
    def months_off(self) -> int:
        """Months from the first version to the nearest the guide allows; 0 where it is right, negative if early."""
        if self.guide_first <= self.month <= self.guide_last:
            return 0
        return self.guide_first - self.month if self.month < self.guide_first else self.guide_last - self.month


def arxiv_month(number: str) -> int:
    """The month of an arXiv number of the form YYMM.NNNNN, as 12 x year + month - 1.

    Raises:
        ValueError: not such a number.
    """
    match = re.fullmatch(r"(\d\d)(\d\d)\.\d{4,5}", number)
    if not match or not 1 <= int(match[2]) <= 12:
        raise ValueError(f"arXiv number {number!r}: must be YYMM.NNNNN")
    return 12 * (2000 + int(match[1])) + int(match[2]) - 1


def month_text(month: int) -> str:
    """A month as "2023-09"."""
    return f"{month // 12}-{month % 12 + 1:02d}"


def works() -> list[Work]:
    """The dated works of the guide's history that have an arXiv number, in the order of their first versions."""
    rows = json.loads(_FILE.read_text(encoding="utf-8"))["works"]
    found = [Work(name, number, _month(first), _month(last), what) for name, number, first, last, what in rows]
    return sorted(found, key=lambda w: w.month)


def reports() -> list[tuple[str, int]]:
    """(catalogue name, month of the technical report) of open models whose report has an arXiv number."""
    rows = json.loads(_FILE.read_text(encoding="utf-8"))["reports"]
    return sorted(((name, arxiv_month(number)) for name, number in rows), key=lambda r: r[1])


def _month(text: str) -> int:
    year, month = text.split("-")
    return 12 * int(year) + int(month) - 1
