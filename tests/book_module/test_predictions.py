"""A guess is kept, put beside what came out, and lost without harm where nothing can be written."""

from __future__ import annotations

import json

import pytest

from kvlab.book import compare, predict


def stored(home) -> dict:
    return json.loads((home / "predictions.json").read_text())


def test_guesses_are_kept_and_replaced_one_by_one(home, shown) -> None:
    predict("01-a", "How many?", 3, "GB")
    predict("01-b", "How long?", 2.5, "s")
    predict("01-a", "How many?", 7, "GB")
    assert stored(home) == {"01-a": 7, "01-b": 2.5}
    assert shown[0]["text/plain"] == "Predict: How many? guess: 3 GB"


@pytest.mark.parametrize(
    ("guess", "value", "said"),
    [
        (10, 10, "Predicted 10 GB, found 10 GB: right."),
        (10, 10.49, "Predicted 10 GB, found 10.5 GB: right."),
        (10, 10.74, "Predicted 10 GB, found 10.7 GB: off by a factor of 1.1."),
        (1000, 40, "Predicted 1,000 GB, found 40 GB: off by a factor of 25."),
        (40, 1234.5, "Predicted 40 GB, found 1,234 GB: off by a factor of 31."),
        (0, 5, "Predicted 0 GB, found 5 GB."),
        (-3, 5, "Predicted -3 GB, found 5 GB."),
    ],
)
def test_compare_says_the_factor(home, shown, guess, value, said) -> None:
    predict("01-a", "How much?", guess, "GB")
    compare("01-a", value)
    assert shown[-1]["text/plain"] == said and said in shown[-1]["text/html"]


@pytest.mark.parametrize(
    ("unit", "found", "said"),
    [
        ("", 5, "Predicted 1, found 5."),  # places and names
        ("", 1, "Predicted 1, found 1: right."),
        ("", 0.7, "Predicted 1, found 0.7: off by a factor of 1.4."),
        ("%", 50.0, "Predicted 1%, found 50%: off by a factor of 50."),
        ("x", 2.5, "Predicted 1x, found 2.5x: off by a factor of 2.5."),
        ("tokens", 16, "Predicted 1 token, found 16 tokens: off by a factor of 16."),
        ("entries", 4, "Predicted 1 entry, found 4 entries: off by a factor of 4."),
        ("ms", 3, "Predicted 1 ms, found 3 ms: off by a factor of 3."),
    ],
)
def test_numbers_and_units_stand_as_a_sentence_has_them(home, shown, unit, found, said) -> None:
    predict("01-a", "How much?", 1, unit)
    compare("01-a", found)
    assert shown[-1]["text/plain"] == said
    assert shown[0]["text/plain"] == f"Predict: How much? guess: {said[10:].split(',')[0]}"


def test_compare_before_predict_says_what_to_run(home) -> None:
    with pytest.raises(ValueError, match=r"prediction '01-a': none was made; run the cell with book\.predict"):
        compare("01-a", 1)


@pytest.mark.parametrize("guess", ["10 GB", None, True, [1]])
def test_a_guess_is_a_number(home, guess) -> None:
    with pytest.raises(ValueError, match="must be a number"):
        predict("01-a", "How much?", guess)
    assert not home.exists()


def test_a_home_that_cannot_be_written_loses_only_the_memory(home, shown) -> None:
    home.parent.mkdir(exist_ok=True)
    home.write_text("a file where the folder should be")  # also refuses root, whom permissions do not stop
    predict("01-a", "How much?", 2, "GB")
    compare("01-a", 4)
    assert shown[-1]["text/plain"] == "Predicted 2 GB, found 4 GB: off by a factor of 2."


def test_a_damaged_store_is_started_anew(home, shown) -> None:
    home.mkdir(parents=True)
    (home / "predictions.json").write_text("{ half a fi")
    predict("01-a", "How much?", 2)
    assert stored(home) == {"01-a": 2}


def test_a_build_keeps_nothing(home, shown, monkeypatch) -> None:
    monkeypatch.setenv("KVLAB_BUILD", "1")
    predict("01-a", "How much?", 2)
    compare("01-a", 2)
    assert not home.exists() and shown[-1]["text/plain"].endswith("right.")


def test_the_page_has_a_labelled_box_and_escapes_its_words(home, shown) -> None:
    predict("01-a", 'Is "a" < b & c?', 2, "k<B")
    page = shown[0]["text/html"]
    assert "Is &quot;a&quot; &lt; b &amp; c?" in page and "k&lt;B" in page and "k<B" not in page
    assert '<label>Your guess on this page <input type="text" inputmode="decimal"' in page
    assert 'data-kv-predict="01-a"' in page
    compare("01-a", 3)
    assert 'data-kv-guess="01-a"' in shown[1]["text/html"]
