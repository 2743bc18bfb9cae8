"""A recorded result is shown with its provenance, or not at all."""

from __future__ import annotations

import json

import pytest

from kvlab.book import load_result, results

WHOLE = {
    "what": "tokens per second", "date": "2026-01-02", "commit": "0123456789abcdef", "device": "2 cores",
    "versions": {"torch": "2.13.0", "kvlab": "0.1"}, "command": "kvlab bench", "ratio": 2.5,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A results folder of its own."""
    monkeypatch.setattr(results, "results_dir", lambda: tmp_path)
    return tmp_path


def test_a_whole_result_is_returned_and_its_provenance_is_a_line(folder) -> None:
    (folder / "engine.json").write_text(json.dumps(WHOLE))
    found = load_result("engine")
    assert found == WHOLE
    assert results.provenance(found) == "Recorded on 2 cores (torch 2.13.0, kvlab 0.1), commit 0123456789, 2026-01-02."


@pytest.mark.parametrize("field", results.REQUIRED)
def test_a_result_without_provenance_is_refused(folder, field) -> None:
    (folder / "engine.json").write_text(json.dumps({k: v for k, v in WHOLE.items() if k != field}))
    with pytest.raises(ValueError, match=f"result 'engine': lacks {field}"):
        load_result("engine")


def test_what_is_not_recorded_lists_what_is(folder) -> None:
    (folder / "quality.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"result 'engine': not recorded \(recorded: quality\)"):
        load_result("engine")


def test_every_recorded_result_of_the_book_has_its_provenance() -> None:
    for path in sorted(results.results_dir().glob("*.json")):
        assert results.provenance(load_result(path.stem)).startswith("Recorded on ")
