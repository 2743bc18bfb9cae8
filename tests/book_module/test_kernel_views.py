"""What chapter 9 shows of kernels: a recorded run where triton is missing, rows that exist, nothing invented."""

from __future__ import annotations

import pytest

from kvlab.book import kernel_views
from kvlab.lab.kernel_access import Example

READ = {"program": [0, 0, 0], "page": 2, "head": 0, "slots": [0, 1], "lanes": [0, 16], "bytes": 64}
ACCESSES = [READ | {"order": i, "segment": segment, "first": 64 * i} for i, segment in enumerate("kv")]


def test_without_triton_a_recorded_run_is_shown_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(example: Example) -> None:
        raise RuntimeError("triton is not installed: it exists for Linux only")

    kept = {"accesses": ACCESSES, "device": "2 cores", "versions": {}, "commit": "0123456789ab", "date": "2026-01-02"}
    monkeypatch.setattr(kernel_views, "recorded", missing)
    monkeypatch.setattr(kernel_views, "load_result", lambda name: kept)
    found, source = kernel_views.accesses(Example())
    assert found == ACCESSES and "Linux only" in source and "2026-01-02" in source


def test_a_run_that_fails_is_not_papered_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(example: Example) -> None:
        raise RuntimeError("IndexError: list index out of range")

    monkeypatch.setattr(kernel_views, "recorded", broken)
    with pytest.raises(RuntimeError, match="IndexError"):
        kernel_views.accesses(Example())


def test_the_figure_has_a_mark_per_load() -> None:
    figure = kernel_views.access_figure(ACCESSES, 4)
    assert [(list(t.x), list(t.y)) for t in figure.data] == [([0], [2]), ([1], [2])]
    assert figure.data[1].hovertext == ("64 bytes from byte 64, lanes 0, 16",)


def test_rows_that_are_not_recorded_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_views, "load_result", lambda name: {"rows": [{"config": "a", "arch": "sm_90"}]})
    assert kernel_views.compiled(["a"]) == [{"config": "a", "arch": "sm_90"}]
    with pytest.raises(ValueError, match="names b: not recorded for sm_90"):
        kernel_views.compiled(["a", "b"])


def test_a_measurement_that_does_not_exist_is_none() -> None:
    assert kernel_views.measured("no_such_measurement") is None
