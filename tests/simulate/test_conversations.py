"""ShareGPT's own JSON: which turns are a request, how lengths are counted, and what a wrong file is told."""

from __future__ import annotations

import json

import pytest

from kvlab.simulate import TraceRequest, parse_trace


def conversation(*turns: tuple[str, object]) -> dict:
    return {"id": "a_0", "conversations": [{"from": who, "value": text} for who, text in turns]}


SHAREGPT = [
    conversation(("human", "one two three"), ("gpt", "four five"), ("human", "six"), ("gpt", "seven")),
    # what a page cut off before the first question is left out, and so is a question that nobody answered
    conversation(("gpt", "from before"), ("human", "one"), ("gpt", "two three")),
    conversation(("human", "one")),
    conversation(("human", "one"), ("human", "two"), ("gpt", "three")),
    conversation(("human", "one"), ("gpt", "  ")),
    conversation(("human", None), ("gpt", "two")),
    conversation(),
]
FOUND = (TraceRequest(0.0, 3, 2), TraceRequest(0.0, 1, 2), TraceRequest(0.0, 1, 1))


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize(
    "text",
    [json.dumps(SHAREGPT), json.dumps(SHAREGPT, indent=2), "\n".join(map(json.dumps, SHAREGPT))],
    ids=["one line", "many lines", "a conversation a line"],
)
def test_a_request_is_the_first_question_and_its_answer(text):
    trace = parse_trace(text.splitlines(keepends=True), count=words)
    assert (trace.kind, trace.timed, trace.requests) == ("sharegpt", False, FOUND)
    assert trace.skipped == (("no question with an answer", 4),)


def test_no_more_texts_are_counted_than_asked_for():
    counted = []
    trace = parse_trace([json.dumps(SHAREGPT)], count=lambda text: counted.append(text) or words(text), limit=2)
    assert trace.requests == FOUND[:2] and counted == ["one two three", "four five", "one", "two three"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[1]", "t, row 1: must be an object with a list of conversations"),
        ('[{"conversations": 5}]', "t, row 1: must be an object with a list"),
        (json.dumps(SHAREGPT)[:-1], "t, row 1: not JSON"),
        (json.dumps(SHAREGPT[0]) + "\n{oops", "t, row 2: not JSON"),
        (json.dumps(SHAREGPT[2:3]), "t: holds no request"),
        ("[]", "t: holds no request"),
    ],
)
def test_a_wrong_file_is_told_where(text, error):
    with pytest.raises(ValueError, match=error):
        parse_trace(text.splitlines(keepends=True), "t", count=words)


def test_texts_without_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match="t: holds texts, and a tokenizer must count their tokens: give one"):
        parse_trace([json.dumps(SHAREGPT)], "t")
