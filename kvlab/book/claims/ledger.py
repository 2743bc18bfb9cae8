"""Reads the ledger's rows and recomputes them.

A row of `data/chapter_NN.toml` is one claim. A computed one names functions of `checks` and their arguments, never a
result:

    [[claim]]
    id = "guide.takeaways.llama3-70b-320kb"
    says = "Llama-3 70B in BF16 keeps 320 KB per token."
    stated = ["320 KB"]
    check = [{ call = "bytes_per_token", model = "llama-3-70b" }]

Any other carries `verdict`, `basis` (source and date, or version and file:symbol) and, where the verdict asks for one, a
`correction`. A computed claim may be judged more strictly than its arithmetic, with `verdict` and `because`.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvlab.book.claims import checks
from kvlab.book.claims.verdict import VERDICTS, judge, parse, worst

DATA = Path(__file__).with_name("data")


@dataclass(frozen=True)
class Entry:
    """One claim with its verdict.

    Attributes:
        id, chapter, says, stated: what is claimed, in our words, and the printed figures.
        recomputed: what the checks gave, for people; empty when nothing is computed.
        verdict: one of `verdict.VERDICTS`.
        correction: what to read instead.
        basis: the calls that were made, or where the verdict is known from.
        computed: whether kvlab computed it in this run.
    """

    id: str
    chapter: int
    says: str
    stated: tuple[str, ...]
    recomputed: str
    verdict: str
    correction: str
    basis: str
    computed: bool

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON."""
        return asdict(self)


def rows(chapter: int | None = None) -> list[dict[str, Any]]:
    """The ledger's raw rows, of one chapter or of all."""
    found = []
    for path in sorted(DATA.glob("chapter_*.toml")):
        number = int(path.stem.removeprefix("chapter_"))
        if chapter in (None, number):
            for row in tomllib.loads(path.read_text(encoding="utf-8")).get("claim", []):
                found.append(row | {"chapter": number})
    return found


@cache
def entries(chapter: int | None = None) -> tuple[Entry, ...]:
    """Every claim of `chapter` (of all chapters), recomputed now.

    Raises:
        ValueError: a row is malformed, or there is no ledger for this chapter.
    """
    found = tuple(_entry(row) for row in rows(chapter))
    if not found:
        raise ValueError(f"chapter {chapter}: no claims are recorded for it yet")
    return found


def _entry(row: dict[str, Any]) -> Entry:
    try:
        recomputed, verdict, basis = _recompute(row) if "check" in row else ("", row["verdict"], row["basis"])
    except KeyError as missing:
        raise ValueError(f"claim {row.get('id')!r}: lacks {missing}") from None
    if "check" in row and "verdict" in row:
        verdict, basis = row["verdict"], f"{basis}; {row['because']}"
    if verdict not in VERDICTS:
        raise ValueError(f"claim {row['id']!r}: verdict {verdict!r} must be one of {', '.join(VERDICTS)}")
    return Entry(
        row["id"], row["chapter"], row["says"], tuple(row.get("stated", ())), recomputed, verdict,
        row.get("correction", ""), basis, "check" in row,
    )  # fmt: skip


def _recompute(row: dict[str, Any]) -> tuple[str, str, str]:
    """(what came out, verdict, calls made) of a computed claim."""
    shown, verdicts, calls = [], [], []
    stated = row.get("stated", [])
    if stated and len(stated) != len(row["check"]):
        raise ValueError(f"claim {row['id']!r}: states {len(stated)} figures, checks {len(row['check'])}")
    for i, check in enumerate(row["check"]):
        value = checks.run(check)
        shown.append(value.text)
        calls.append(checks.describe(check))
        if stated:
            verdicts.append(judge(parse(stated[i]), value.number, value.other_readings))
        else:
            verdicts.append("reproduced" if value.number else "wrong")
    return "; ".join(shown), worst(verdicts), "; ".join(calls)
