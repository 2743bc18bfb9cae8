"""Answers to exercises, checked without being revealed: only digests are kept.

A numeric answer is rounded to three significant digits and both neighbours are accepted, so 0.1 % of rounding
does not matter; a text answer is compared without case and spaces. To add one:
`python -m kvlab.book.answers ID ANSWER`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

_FILE = Path(__file__).with_name("answers.json")


def _digest(key: str, text: str) -> str:
    return hashlib.sha256(f"kvlab:{key}:{text}".encode()).hexdigest()[:20]


def _forms(answer: float | str) -> list[str]:
    """The accepted spellings of an answer; the first is the one that is stored."""
    if isinstance(answer, str):
        return ["".join(answer.lower().split())]
    if answer == 0:
        return ["0"]
    mantissa, exponent = f"{float(answer):.2e}".split("e")
    middle = round(float(mantissa) * 100)
    return [f"{m}e{int(exponent)}" for m in (middle, middle - 1, middle + 1)]


def seal(key: str, answer: float | str) -> None:
    """Stores the digest of `answer` under `key` in answers.json."""
    kept = json.loads(_FILE.read_text(encoding="utf-8")) if _FILE.exists() else {}
    kept[key] = _digest(key, _forms(answer)[0])
    _FILE.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n", encoding="utf-8")


def check(key: str, answer: float | str | None) -> bool:
    """Says whether `answer` to exercise `key` is right; returns it too.

    Raises:
        ValueError: there is no such exercise.
    """
    kept = json.loads(_FILE.read_text(encoding="utf-8")) if _FILE.exists() else {}
    if key not in kept:
        raise ValueError(f"exercise {key!r}: unknown; known: {', '.join(kept) or 'none'}")
    if answer is None or answer is ...:
        print(f"{key}: no answer yet.")
        return False
    right = kept[key] in {_digest(key, form) for form in _forms(answer)}
    print(f"{key}: {'right.' if right else 'not yet. Check units, and which factor you left out.'}")
    return right


if __name__ == "__main__":
    name, given = sys.argv[1], sys.argv[2]
    try:
        seal(name, float(given))
    except ValueError:
        seal(name, given)
