"""What is recorded of trained heads: on questions that they never saw."""

from __future__ import annotations

import pytest

from kvlab.book.results import load_result
from kvlab.lab.train_heads import prompts, unseen


def test_unseen_questions_are_none_that_training_can_reach() -> None:
    learned = set(prompts(0, 300)[-250:])
    assert len(set(unseen(50))) == 50 and not learned & set(unseen(50))
    for count in (0, 51):
        with pytest.raises(ValueError, match=f"count {count}"):
            unseen(count)
    report = load_result("speculation")["heads"]
    assert int(report["texts"]) + report["held_out_texts"] <= 250


def test_heads_bring_something_on_questions_that_they_never_saw() -> None:
    """A step gives at least its own token; a head that learned its kind of text is right for some of the drafts."""
    held = load_result("speculation")["held_out"]
    assert held["questions"] >= 8 and held["commit"] and held["device"]
    for row in held["rows"]:
        low, high = row["tokens_per_step"]["band95"]
        assert 1 < low <= row["tokens_per_step"]["mean"] <= high < row["k"] + 1, row
        assert 0 < row["accepted"]["mean"] < 1, row
    assert {row["method"] for row in held["rows"]} == {"medusa", "eagle", "eagle tree"}
