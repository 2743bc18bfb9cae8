"""The evaluation text: reference prose that every Python carries, so a measurement can be repeated anywhere.

The topics of Python's language reference (`pydoc_data.topics`, in Debian's package libpython3-stdlib) under the
Python Software Foundation License. It differs between Python versions, so a result names the version and the
SHA-256 of the text, and compares only what was measured on one text.
"""

from __future__ import annotations

import hashlib
import platform
import re
from dataclasses import dataclass

SKIPPED = ("formatstrings", "bltin-", "debugger", "license")
"""Topics left out: tables, and lists of one-line commands."""


@dataclass(frozen=True)
class EvaluationText:
    """A text with what a result must say of it."""

    text: str
    source: str
    licence: str

    @property
    def sha256(self) -> str:
        """Hash of the UTF-8 text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def evaluation_text() -> EvaluationText:
    """The prose paragraphs of Python's language reference, unwrapped, in the order of their topics' names.

    Indented blocks (code, grammar) and headings are left out: a paragraph counts when it is at least two lines of
    running text.
    """
    from pydoc_data.topics import topics

    paragraphs: list[str] = []
    for name in sorted(topics):
        if not name.startswith(SKIPPED):
            paragraphs += _prose(topics[name])
    unique = dict.fromkeys(paragraphs)  # topics repeat one another, and a repeated paragraph is memory, not language
    return EvaluationText(
        "\n\n".join(unique),
        f"pydoc_data.topics of Python {platform.python_version()} (prose paragraphs)",
        "Python Software Foundation License 2.0",
    )


def _prose(topic: str) -> list[str]:
    found = []
    for block in re.split(r"\n\s*\n", topic):
        lines = block.split("\n")
        plain = all(line and not line[0].isspace() for line in lines)
        if plain and len(lines) >= 2 and not set(lines[1]) <= set("*=-~\"'^"):
            found.append(" ".join(lines))
    return found
