"""Passkey retrieval: what a prompt is made of, and what is recorded."""

from __future__ import annotations

import pytest

from kvlab.book.results import load_result
from kvlab.lab.passkey import make_trial


class Words:
    """A start token, 0, then every word is a token; the same word, the same id."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {"<start>": 0}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        words = ["<start>"] * special + text.split()
        return [self.known.setdefault(word, len(self.known)) for word in words]


class Model:
    tokenizer = Words()


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_the_number_stands_where_it_was_asked_to(depth: float) -> None:
    trial = make_trial(Model, 300, depth, seed=7)
    key = trial.ids[-1]
    assert trial.answer == 1 and 260 < len(trial.ids) <= 300
    # "The pass key is N. Remember it. N is the pass key.": with its full stop N is another word of this tokenizer
    assert trial.ids.index(key) == trial.shared + 7
    assert trial.ids[0] == 0 and trial.ids.count(0) == 1  # a start token within a text is a new text
    before = trial.shared / len(trial.ids)
    assert abs(before - depth) < 0.2


def test_seeds_give_other_numbers_and_the_same_filler() -> None:
    one, two = make_trial(Model, 300, 0.5, 1), make_trial(Model, 300, 0.5, 2)
    assert one.ids[: one.shared] == two.ids[: two.shared] and one.ids[-1] != two.ids[-1]
    with pytest.raises(ValueError, match="must leave room for filler"):
        make_trial(Model, 30, 0.5, 1)


@pytest.mark.parametrize("name", ["passkey_kv_formats", "passkey_kv_formats_gemma"])
def test_the_records_start_where_full_precision_retrieves(name: str) -> None:
    for row in load_result(name)["formats"]["fp32"].values():
        assert row["retrieved"] >= 0.9 * row["of"]


def test_fewer_bits_retrieve_fewer_numbers_on_the_default_model() -> None:
    result = load_result("passkey_kv_formats")
    found = {name: sum(row["retrieved"] for row in rows.values()) for name, rows in result["formats"].items()}
    assert found["fp32"] == found["int8"] >= found["int4"] > found["kivi2"]
