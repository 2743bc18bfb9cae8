"""Answers are recognized without being stored: only digests are kept."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvlab.book import answers


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """An answers file of its own."""
    path = tmp_path / "answers.json"
    monkeypatch.setattr(answers, "_FILE", path)
    return path


@pytest.mark.parametrize("given", [10.737, 10.7, 10.74, 10.69, 10.8, 10.6])
def test_three_digits_and_their_neighbours_are_right(given, capsys) -> None:
    answers.seal("01-ex1", 10.737)
    assert answers.check("01-ex1", given) and "right." in capsys.readouterr().out


@pytest.mark.parametrize("given", ["327,680", " 327680 ", "3.2768e5"])
def test_a_number_in_quotes_is_a_number(given) -> None:
    answers.seal("01-ex1", 327_680)
    assert answers.check("01-ex1", given) and not answers.check("01-ex1", "327 KiB")


@pytest.mark.parametrize("given", [10.5, 11, 1.07, 107, -10.7, 0, "10.7 GB"])
def test_anything_further_is_not_yet(given, capsys) -> None:
    answers.seal("01-ex1", 10.737)
    assert not answers.check("01-ex1", given)
    assert capsys.readouterr().out == "01-ex1: not yet. Check units, and which factor you left out.\n"


@pytest.mark.parametrize(
    ("sealed", "given"),
    [(327_680, 327_680), (327_680, 328_000), (100, 99.95), (1000, 999), (999, 1000), (9.99, 10), (10, 9.99), (0, 0.0)],
)
def test_neighbours_across_a_power_of_ten_are_neighbours(sealed, given) -> None:
    answers.seal("01-ex1", sealed)
    assert answers.check("01-ex1", given)


def test_letters_may_be_set_apart() -> None:
    answers.seal("01-ex1", "ab")
    assert (
        answers.check("01-ex1", "a, b") and answers.check("01-ex1", "(a) (b)") and not answers.check("01-ex1", "b, a")
    )


def test_text_is_compared_without_case_and_spaces() -> None:
    answers.seal("01-ex2", "KV heads")
    assert answers.check("01-ex2", " kv Heads ") and not answers.check("01-ex2", "query heads")


@pytest.mark.parametrize("nothing", [None, ...])
def test_no_answer_yet_is_no_error(nothing, capsys) -> None:
    answers.seal("01-ex1", 7)
    assert not answers.check("01-ex1", nothing) and capsys.readouterr().out == "01-ex1: no answer yet.\n"


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), True, [7], {}])
def test_what_is_no_answer_is_not_yet_and_no_crash(odd) -> None:
    answers.seal("01-ex1", 7)
    assert not answers.check("01-ex1", odd)


def test_a_yes_is_no_number() -> None:
    answers.seal("01-ex1", 1)
    answers.seal("01-ex2", "true")
    assert not answers.check("01-ex1", True) and answers.check("01-ex2", True)


def test_what_is_no_answer_is_not_sealed(kept) -> None:
    with pytest.raises(ValueError, match="answer nan: must be a finite number or a text"):
        answers.seal("01-ex1", float("nan"))
    assert not kept.exists()


def test_an_unknown_exercise_is_named() -> None:
    answers.seal("01-ex1", 7)
    with pytest.raises(ValueError, match="exercise '01-ex9': unknown; known: 01-ex1"):
        answers.check("01-ex9", 7)


def test_the_same_answer_to_two_exercises_has_two_digests(kept) -> None:
    answers.seal("01-ex1", 327_680)
    answers.seal("01-ex2", 327_680)
    text = kept.read_text()
    assert len(set(json.loads(text).values())) == 2 and "327" not in text.replace("01-ex", "")


def test_sealing_from_the_command_line_writes_the_file_it_checks() -> None:
    code = (
        "import runpy, sys, pathlib; from kvlab.book import answers;"
        "sys.argv = ['answers', '01-ex1', sys.argv[1]];"
        "pathlib.Path.write_text = lambda self, text, **kw: print(self.name, '01-ex1' in text);"
        "runpy.run_module('kvlab.book.answers', run_name='__main__')"
    )
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code, "10.7"], capture_output=True, text=True)
    assert ended.stdout == "answers.json True\n", ended.stderr
