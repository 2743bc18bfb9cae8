"""The mechanism of the ledger: rows are recomputed, malformed ones are refused by name."""

from __future__ import annotations

import pytest

from kvlab.book.claims import checks, ledger

LLAMA = {"call": "bytes_per_token", "model": "llama-3-70b"}


def entry(**fields):
    return ledger._entry({"id": "a.claim", "chapter": 1, "says": "Something."} | fields)


def test_a_computed_row_carries_what_was_computed_and_how() -> None:
    found = entry(stated=["320 KB"], check=[LLAMA], correction="320.00 KiB")
    assert found.verdict == "reproduced-with-unit-note" and found.computed
    assert found.recomputed == "327,680 B = 327.68 KB = 320.00 KiB"
    assert found.basis == "bytes_per_token(model='llama-3-70b')"


def test_a_stated_figure_that_changes_changes_the_verdict() -> None:
    assert entry(stated=["327,680 B"], check=[LLAMA]).verdict == "reproduced"
    assert entry(stated=["163,840 B"], check=[LLAMA]).verdict == "wrong"


def test_also_is_shown_and_not_judged() -> None:
    found = entry(stated=["327,680 B"], check=[LLAMA], also=[{"call": "layers", "model": "llama-3-70b"}])
    assert found.verdict == "reproduced" and found.recomputed.endswith("320.00 KiB; 80 layers")
    assert found.basis.endswith("layers(model='llama-3-70b')")


def test_without_a_figure_a_claim_holds_when_its_relations_do() -> None:
    small, large = LLAMA, {"call": "bytes_per_token", "model": "llama-1-65b"}
    assert entry(check=[{"call": "exceeds", "of": large, "to": small}]).verdict == "reproduced"
    assert entry(check=[{"call": "exceeds", "of": small, "to": large}]).verdict == "wrong"
    assert entry(check=[{"call": "exceeds", "of": small, "to": small}]).verdict == "wrong"
    assert entry(check=[{"call": "equals", "of": small, "to": small}]).verdict == "reproduced"
    mixed = [{"call": "equals", "of": small, "to": small}, {"call": "equals", "of": small, "to": large}]
    assert entry(check=mixed).verdict == "wrong"


def test_a_verdict_of_its_own_needs_a_reason() -> None:
    found = entry(stated=["320 KiB"], check=[LLAMA], verdict="imprecise", because="of a reason")
    assert found.verdict == "imprecise" and found.basis.endswith("; of a reason")
    with pytest.raises(ValueError, match=r"^claim 'a\.claim': lacks 'because'$"):
        entry(stated=["320 KiB"], check=[LLAMA], verdict="imprecise")


def test_an_uncomputed_row_needs_verdict_and_basis() -> None:
    assert not entry(verdict="wrong", basis="arXiv:1234.56789").computed
    with pytest.raises(ValueError, match=r"'a\.claim': lacks 'basis'"):
        entry(verdict="wrong")
    with pytest.raises(ValueError, match=r"'a\.claim': lacks 'verdict'"):
        entry(basis="arXiv:1234.56789")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"verdict": "true", "basis": "x"}, r"verdict 'true' must be one of reproduced, .*not-checkable-here"),
        ({"check": [LLAMA], "stated": ["320 KB", "10 GB"]}, "states 2 figures, checks 1"),
        ({"check": [LLAMA], "stated": ["a lot"]}, "stated 'a lot': must be a number"),
        ({"check": [{"call": "guess"}]}, r"check 'guess': must be one of bytes_per_token, .*ratio"),
        ({"check": [{"model": "llama-3-70b"}]}, "check None: must be one of"),
        ({"check": [{"call": "layers", "model": "llama-9"}]}, "model 'llama-9'"),
        ({"check": [{"call": "layers", "modell": "gpt2"}]}, r"check layers\(modell='gpt2'\): .*modell"),
        ({"verdict": "wrong", "basis": "x", "corection": "y"}, "field 'corection' must be one of id, says"),
    ],
)
def test_a_malformed_row_is_refused_by_name(fields, message) -> None:
    with pytest.raises(ValueError, match=rf"^claim 'a\.claim': .*{message}"):
        entry(**fields)


def test_a_row_without_id_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^claim None: lacks 'id'"):
        ledger._entry({"chapter": 1, "says": "x", "verdict": "wrong", "basis": "x"})


def test_a_chapter_without_ledger_is_said() -> None:
    with pytest.raises(ValueError, match=r"^chapter 99: no claims are recorded for it yet$"):
        ledger.entries(99)


def test_nested_calls_read_as_calls() -> None:
    row = {"call": "ratio", "of": LLAMA, "to": {"call": "remainder", "of": LLAMA, "less": [LLAMA]}}
    one = "bytes_per_token(model='llama-3-70b')"
    assert checks.describe(row) == f"ratio(of={one}, to=remainder(of={one}, less=[{one}]))"


def test_a_changed_config_changes_the_number_and_not_the_model() -> None:
    halved = checks.run(LLAMA | {"change": {"num_hidden_layers": 40}})
    assert (halved.number, checks.run(LLAMA).number) == (163_840, 327_680)
