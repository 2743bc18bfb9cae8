"""Reads the ledger's rows and recomputes them.

A row of `data/chapter_NN.toml` is one claim. A computed one names functions of `checks` and their arguments, never a
result:

    [[claim]]
    id = "guide.takeaways.llama3-70b-320kb"
    says = "Llama-3 70B in BF16 keeps 320 KB per token."
    stated = ["320 KB"]
    check = [{ call = "bytes_per_token", model = "llama-3-70b" }]

Checks under `also` are shown beside the others and not judged: what the correction needs. Any other claim carries
`verdict`, `basis` (source and date, or version and file:symbol) and, where the verdict asks for one, a `correction`.
Arithmetic does not see everything: a computed claim may carry its own `verdict`, and says why in `because`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
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


FIELDS = ("id", "says", "stated", "check", "also", "verdict", "because", "basis", "correction", "chapter")


def _entry(row: dict[str, Any]) -> Entry:
    name = f"claim {row.get('id')!r}"
    if unknown := sorted(set(row) - set(FIELDS)):
        raise ValueError(f"{name}: field {unknown[0]!r} must be one of {', '.join(FIELDS)}")
    try:
        recomputed, verdict, basis = _computed(row) if "check" in row else ("", row["verdict"], row["basis"])
        entry = Entry(
            row["id"], row["chapter"], row["says"], tuple(row.get("stated", ())), recomputed, verdict,
            row.get("correction", ""), basis, "check" in row,
        )  # fmt: skip
    except KeyError as missing:
        raise ValueError(f"{name}: lacks {missing}") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if verdict not in VERDICTS:
        raise ValueError(f"{name}: verdict {verdict!r} must be one of {', '.join(VERDICTS)}")
    return entry


def _computed(row: dict[str, Any]) -> tuple[str, str, str]:
    """(what came out, verdict, calls made and why the verdict is not theirs) of a computed claim."""
    values = [checks.run(check) for check in row["check"]]
    extra = [checks.run(check) for check in row.get("also", ())]
    verdict = row["verdict"] if "verdict" in row else _judged(row.get("stated", ()), values)
    notes = [row["because"]] if "verdict" in row or "because" in row else []
    calls = [checks.describe(check) for check in (*row["check"], *row.get("also", ()))]
    return "; ".join(v.text for v in (*values, *extra)), verdict, "; ".join(calls + notes)


def _judged(stated: Sequence[str], values: list[checks.Value]) -> str:
    """The worst verdict over the figures; a claim without figures holds when its checks give anything but 0."""
    if not stated:
        return "reproduced" if all(value.number for value in values) else "wrong"
    if len(stated) != len(values):
        raise ValueError(f"states {len(stated)} figures, checks {len(values)}")
    return worst([judge(parse(s), v.number, v.other_readings) for s, v in zip(stated, values, strict=True)])
