"""The ledger's rules, over every claim it has. Regenerate the golden file after a change that is meant:

python tests/book_module/test_claims.py
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from decimal import Decimal
from difflib import SequenceMatcher
from pathlib import Path

import pytest

from kvlab.book.claims import entries
from kvlab.book.claims.ledger import rows

GOLDEN = Path(__file__).with_name("claims_golden.json")
CHAPTERS = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 21, 22}
SHARED = Path(__file__).resolve().parents[3] / "shared" / "claims" / "claims.json"
NUMBER = r"\d[\d,]*(?:\.\d+)?"
WITH_UNIT = rf"(?<![\w.-])({NUMBER})(?:\s(?:[KMGT]i?B|bytes|B|tokens|billion|ms|s|TB/s|times)\b|x\b|\s?%)"

computed = [row for row in rows() if "check" in row]


def by_id(row) -> str:
    return row["id"]


def by_id_of_entry(entry) -> str:
    return entry.id


def golden() -> list[list[str]]:
    return [[e.id, e.verdict, e.recomputed] for e in entries()]


def numbers(text: str) -> set[Decimal]:
    return {Decimal(n.replace(",", "")) for n in re.findall(NUMBER, text)}


def literals(value) -> set[str]:
    """Every number and text among the arguments of a check, however nested."""
    if isinstance(value, dict):
        return set().union(*(literals(v) for k, v in value.items() if k not in ("call", "field")))
    if isinstance(value, list):
        return set().union(*map(literals, value))
    return {str(value)}


def same_figure(stated: str, literal: str) -> bool:
    """Whether an argument is the stated figure: the same number, whatever the unit or the spacing."""
    figure = re.fullmatch(rf"~?\s*({NUMBER})\s*[A-Za-z%]*", literal.strip())
    return figure is not None and numbers(figure.group(1)) <= numbers(stated)


def test_nothing_that_was_recomputed_has_changed() -> None:
    kept = json.loads(GOLDEN.read_text(encoding="utf-8"))
    for was, now in zip(kept, golden(), strict=False):
        assert now == was, "a change that is meant: python tests/book_module/test_claims.py"
    assert len(golden()) == len(kept)


def test_every_claim_has_one_row() -> None:
    assert [i for i, n in Counter(map(by_id, rows())).items() if n > 1] == []


def test_every_claim_of_the_texts_up_to_here_is_in_the_ledger() -> None:
    if not SHARED.exists():
        pytest.skip("needs ../shared/claims/claims.json, the list of claims, which is not part of the project")
    claims = json.loads(SHARED.read_text(encoding="utf-8"))
    asked = {c["id"]: c["chapter_no"] for c in claims if c["chapter_no"] in CHAPTERS}
    assert {e.id: e.chapter for e in entries()} == asked


def test_the_words_are_our_own() -> None:
    if not SHARED.exists():
        pytest.skip("needs ../shared/claims/claims.json, the list of claims, which is not part of the project")
    theirs = {c["id"]: c["statement"] for c in json.loads(SHARED.read_text(encoding="utf-8"))}

    def alike(row) -> float:
        return SequenceMatcher(None, row["says"].lower(), theirs.get(row["id"], "").lower()).ratio()

    assert [row["id"] for row in rows() if alike(row) > 0.9] == []


@pytest.mark.parametrize("row", computed, ids=by_id)
def test_a_stated_figure_is_not_handed_to_its_own_check(row) -> None:
    for stated, check in zip(row.get("stated", ()), row["check"], strict=False):
        assert not [a for a in literals(check) if same_figure(stated, a)]


def test_the_rule_on_literals_sees_a_literal() -> None:
    assert same_figure("~8 GB", "8GB") and same_figure("327,680 B", "327680") and same_figure("7-8 requests", "8")
    assert not same_figure("8x", "llama-3-8b") and not same_figure("10.5 GB", "105") and not same_figure("4 GB", "64k")
    nested = {"call": "ratio", "of": {"call": "size", "text": "8 GB"}, "to": {"call": "x", "change": {"n": 64}}}
    assert literals(nested) == {"8 GB", "64"}


@pytest.mark.parametrize("entry", [e for e in entries() if e.computed], ids=by_id_of_entry)
def test_a_number_in_a_correction_was_computed_or_stated(entry) -> None:
    printed = re.findall(WITH_UNIT, entry.correction)
    known = numbers(entry.recomputed) | numbers(" ".join(entry.stated))
    assert {n for n in printed if Decimal(n.replace(",", "")) not in known} == set()


@pytest.mark.parametrize("entry", entries(), ids=by_id_of_entry)
def test_a_claim_says_what_it_is_judged_by(entry) -> None:
    assert entry.says.endswith(".") and entry.basis
    if entry.verdict in ("wrong", "imprecise", "contradicts-other-source", "reproduced-with-unit-note"):
        assert entry.correction.endswith(".")


@pytest.mark.parametrize("row", [r for r in rows() if "check" not in r], ids=by_id)
def test_what_is_not_computed_names_its_source(row) -> None:
    named = r"arXiv:\d{4}\.\d{5}|\d{4}-\d{2}-\d{2}|\w+\.py[:\w]*|the guide|20\d\d|kvlab\.|no architecture is published"
    named += r"|open until chapter \d+|measured in chapter \d+, section"
    assert re.search(named, row["basis"])


def test_what_was_counted_in_the_text_is_what_it_holds() -> None:
    text = SHARED.parents[1] / "source" / "guide.txt"
    if not text.exists():
        pytest.skip("needs ../shared/source/guide.txt, which is not part of the project")
    guide = text.read_text(encoding="utf-8")
    contents, questions = (
        guide.split("Table of contents")[1].split("---")[0],
        guide.split("\nFrequently asked questions\n")[1],
    )
    held = {
        "word-count": f"{len(guide.split()):,} words",
        "section-count": f"{len(re.findall(r'^[0-9]+[.] ', contents, re.M))} entries",
        "faq-count": f"{len(re.findall(r'^Q: ', questions.split('---')[0], re.M))} questions",
    }
    counted = {
        e.id.removeprefix("guide.meta."): e.basis.split(": ")[1] for e in entries() if e.id.startswith("guide.meta.")
    }
    assert counted == held


MEASURED = r"(?:measured|shown) in chapter (\d+), section ([^;]+?)(?:: kvlab[^;]*)?(?:;|$)"


@pytest.mark.parametrize("row", [r for r in rows() if re.search(MEASURED, r.get("basis", ""))], ids=by_id)
def test_what_is_measured_in_a_chapter_has_its_section_there(row) -> None:
    for number, section in re.findall(MEASURED, row["basis"]):
        found = list((Path(__file__).parents[2] / "chapters").glob(f"{int(number):02d}_*.ipynb"))
        if not found:
            pytest.skip(f"chapter {number} is not here yet")
        cells = json.loads(found[0].read_text(encoding="utf-8"))["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        assert section in re.findall(r"^##+ (.*?)\s*$", text, re.M)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{GOLDEN.name}: {len(golden())} claims", file=sys.stderr)
