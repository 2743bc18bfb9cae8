"""The ledger of a chapter as a table in a notebook, and as lines in a terminal."""

from __future__ import annotations

from collections import Counter

from kvlab.book.claims.ledger import Entry, entries
from kvlab.book.session import table


def claims_table(chapter: int) -> None:
    """Shows every claim of `chapter` with what was recomputed, or else the source it is judged by, the verdict and the correction."""
    found = entries(chapter)
    counted = ", ".join(f"{count} {verdict}" for verdict, count in Counter(e.verdict for e in found).most_common())
    table(
        [(e.says, "; ".join(e.stated), e.recomputed or f"source: {e.basis}", e.verdict, e.correction) for e in found],
        ("What the text says", "Figure", "Recomputed, or source", "Verdict", "Read instead"),
        caption=f"Claims of section {chapter}: {counted}.",
    )


def lines(found: tuple[Entry, ...]) -> list[str]:
    """The claims for a terminal: a line with the verdict, indented lines with the rest."""
    out = []
    for e in found:
        out.append(f"{e.verdict:<26}{e.id}")
        out.append(f"    {e.says}")
        for label, text in (("computed", e.recomputed), ("instead", e.correction), ("basis", e.basis)):
            if text:
                out.append(f"    {label}: {text}")
    return out
