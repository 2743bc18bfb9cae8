"""Opening cell, numbers in prose, tables, progress."""

from __future__ import annotations

import html
import random

import pytest

from kvlab.book import bound, claims_table, progress, say, setup, table
from kvlab.book.claims import entries


def test_a_number_in_prose_must_be_the_computed_one() -> None:
    bound("05-token", "320.00 KiB", "320.00 KiB")
    with pytest.raises(ValueError, match=r"number '05-token': the text prints '320 KB', the run gives '320\.00 KiB'"):
        bound("05-token", "320 KB", "320.00 KiB")


def test_setup_seeds_and_says_what_runs(capsys) -> None:
    setup(5)
    first, line = random.random(), capsys.readouterr().out
    setup(5)
    assert random.random() == first
    assert line.startswith("chapter 5 · seed 0 · kvlab ") and "Python 3." in line and "torch" in line


@pytest.mark.parametrize("chapter", [0, 26, -1])
def test_a_chapter_is_one_of_the_sections(chapter) -> None:
    with pytest.raises(ValueError, match=f"chapter {chapter}: must be 1 to 25"):
        setup(chapter)


def test_a_table_escapes_everything_and_aligns_numbers(shown) -> None:
    table([("<b>a</b>", 32768, "~70 KB", None), ('"x" & y', 1.5, "-3", True)], ("<h>", "n"), caption='c "1" < 2')
    page = shown[0]["text/html"]
    assert (
        "&lt;b&gt;a&lt;/b&gt;" in page and "&quot;x&quot; &amp; y" in page and "<b>" not in page and "<h>" not in page
    )
    assert page.count("c &quot;1&quot; &lt; 2") == 2 and 'tabindex="0" role="region"' in page
    assert page.count("class=num") == 4 and "<td class=num>32,768</td>" in page and "<td>True</td>" in page
    assert shown[0]["text/plain"].splitlines()[0] == 'c "1" < 2'


def test_a_sentence_is_markdown(shown) -> None:
    say("It takes **10.00 GiB**.")
    assert shown == [{"text/markdown": "It takes **10.00 GiB**.", "text/plain": "It takes **10.00 GiB**."}]


def test_outside_a_notebook_the_plain_text_is_printed(capsys) -> None:
    say("It takes 10.00 GiB.")
    assert capsys.readouterr().out == "It takes 10.00 GiB.\n"


def test_progress_yields_everything_and_is_silent_in_a_build(monkeypatch, capfd) -> None:
    monkeypatch.setenv("KVLAB_BUILD", "1")
    assert list(progress(iter([3, 1, 2]), "work")) == [3, 1, 2] and capfd.readouterr() == ("", "")
    monkeypatch.delenv("KVLAB_BUILD")
    assert list(progress([3, 1, 2], "work")) == [3, 1, 2]


def test_a_chapter_shows_its_claims(shown) -> None:
    claims_table(1)
    page = shown[0]["text/html"]
    assert page.count("<tr>") == 9 and "10,737,418,240 B" in page
    assert "Claims of section 1: 3 not-checkable-here, 3 reproduced-with-unit-note, 1 imprecise, 1 wrong." in page


def test_every_claim_shows_what_its_verdict_stands_on(shown) -> None:
    claims_table(14)
    for entry, row in zip(entries(14), shown[0]["text/html"].split("<tr>")[2:], strict=True):
        third = row.split("</td>")[2].split("<td>")[-1]
        assert html.unescape(third) == (entry.recomputed or f"source: {entry.basis}") and len(third) > 8
