"""Two ranks in two processes: equal events give equal tables, a lost one is seen in the step in which it matters."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from kvlab.lab.ranks import STEP, Rank, abort, add, run_ranks, serve

STORY = [add("a", 6, 8), add("b", 3, 8), STEP, STEP, abort("a"), add("c", 9, 3), STEP, STEP, STEP]
LOST = STORY.index(abort("a"))


def test_equal_events_give_equal_tables_in_both_processes() -> None:
    found = run_ranks(STORY)
    assert all(compared.agree and compared.same_batch for compared in found)
    assert found[6].answers[0]["tables"] == {"b": [[3, 1]], "c": [[2, 4, 5]]}
    assert found[6].answers[0] == found[6].answers[1]


def test_a_lost_abort_shows_at_once_and_in_every_later_step() -> None:
    found = run_ranks(STORY, missed=LOST)
    assert [compared.agree for compared in found] == [True] * LOST + [False] * (len(STORY) - LOST)
    assert found[LOST].differing == ["a"]
    # the rank that still runs a gives b and c other pages, and computes a token more
    step = found[LOST + 2]
    assert step.differing == ["a", "b", "c"] and not step.same_batch
    assert step.answers[1]["tables"] == {"a": [[1, 2]], "b": [[3, 4]], "c": [[5, 6, 7]]}
    assert [sum(n for _, n in answer["batch"]) for answer in step.answers] == [10, 11]


def test_a_rank_speaks_a_line_for_a_line() -> None:
    out = io.StringIO()
    serve(io.StringIO(json.dumps(add("a", 5, 2)) + "\n" + json.dumps(STEP) + "\n"), out)
    answers = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [answer["tables"] for answer in answers] == [{}, {"a": [[1, 2]]}]
    assert answers[1]["batch"] == [["a", 5]]


def test_a_rank_that_ended_is_an_error() -> None:
    with Rank() as rank, pytest.raises(RuntimeError, match="its process ended with 1 after"):
        rank.tell({"do": "add"})


def test_a_rank_needs_no_torch() -> None:
    code = "import sys, kvlab.lab.ranks; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
