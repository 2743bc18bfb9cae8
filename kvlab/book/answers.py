"""Answers to exercises, checked without being revealed: only digests are kept.

A numeric answer is rounded to three significant digits and both neighbours are accepted, so 0.1 % of rounding
does not matter, and it may stand in quotes; a text answer is compared without case and spaces. To add one:
`python -m kvlab.book.answers ID ANSWER`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from pathlib import Path

_FILE = Path(__file__).with_name("answers.json")


def _digest(key: str, text: str) -> str:
    return hashlib.sha256(f"kvlab:{key}:{text}".encode()).hexdigest()[:20]


def _forms(answer: object) -> list[str]:
    """The accepted spellings of an answer, the first of which is stored; none for what is no number and no text."""
    if isinstance(answer, str | bool):
        text = "".join(str(answer).lower().split())
        if not re.fullmatch(r"[-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?", text):
            return [text, re.sub(r"\W+", "", text)]  # "a, b" for "ab"
        answer = text.replace(",", "")  # a number in quotes, thousands apart or not
    try:
        number = float(answer)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return []
    if not math.isfinite(number):
        return []
    if number == 0:
        return ["0"]
    mantissa, exponent = f"{abs(number):.2e}".split("e")
    middle, sign = round(float(mantissa) * 100), "-" if number < 0 else ""
    return [sign + _spelled(m, int(exponent)) for m in (middle, middle - 1, middle + 1)]


def _spelled(hundredths: int, exponent: int) -> str:
    """A three-digit mantissa and its exponent; a neighbour may have crossed a power of ten."""
    if hundredths == 99:
        return f"999e{exponent - 1}"
    if hundredths == 1000:
        return f"100e{exponent + 1}"
    return f"{hundredths}e{exponent}"


def seal(key: str, answer: float | str) -> None:
    """Stores the digest of `answer` under `key` in answers.json.

    Raises:
        ValueError: answer is neither a finite number nor a text.
    """
    if not _forms(answer):
        raise ValueError(f"answer {answer!r}: must be a finite number or a text")
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
