"""One rule from a printed figure to a verdict, at its boundaries."""

from __future__ import annotations

import pytest

from kvlab.book.claims.verdict import judge, parse, worst


def verdict(stated: str, computed: float, *other_readings: float) -> str:
    return judge(parse(stated), computed, other_readings)


@pytest.mark.parametrize(
    ("text", "low", "high", "unit"),
    [
        ("10.5 GB", 10.45, 10.55, "GB"),
        ("42.0 GB", 41.95, 42.05, "GB"),
        ("327,680 B", 327679.5, 327680.5, "B"),
        ("7-8 requests", 6.5, 8.5, "requests"),
        ("5 - 6", 4.5, 6.5, ""),
        ("2x", 1.5, 2.5, "x"),
        ("~8 GB", 7.5, 8.5, "GB"),
        ("~70 KB", 65, 75, "KB"),
        ("70 KB", 69.5, 70.5, "KB"),
        ("~26,000 words", 25500, 26500, "words"),
        ("~1.50", 1.495, 1.505, ""),
        ("30-50%", 29.5, 50.5, "%"),
    ],
)
def test_a_figure_stands_for_a_range_of_its_last_digit(text, low, high, unit) -> None:
    found = parse(text)
    assert (found.low, found.high) == pytest.approx((low, high)) and (found.unit, found.text) == (unit, text)


@pytest.mark.parametrize(
    "text", ["", "GB", "many GB", "10.5 gigs", "1.2.3 GB", "<1", "8 vs 64", "10 GB or so", "-3 GB"]
)
def test_what_is_no_figure_is_refused_with_the_units_known(text) -> None:
    with pytest.raises(ValueError, match=r"^stated .*: must be a number, or a range, with one of .*KiB.*GB"):
        parse(text)


@pytest.mark.parametrize(
    ("gigabytes", "expected"),
    [(10.45, "reproduced"), (10.55, "reproduced"), (10.449, "imprecise"), (10.551, "imprecise"),
     (9.6, "imprecise"), (9.5, "wrong"), (11.6, "imprecise"), (11.7, "wrong"), (0.5, "wrong")],
)  # fmt: skip
def test_boundaries_of_10_5_gb(gigabytes, expected) -> None:
    assert verdict("10.5 GB", gigabytes * 1e9) == expected


def test_the_edge_is_inside_however_the_float_rounds() -> None:
    assert [verdict("0.3 s", x) for x in (0.25, 0.35, 0.1 + 0.2 + 0.05)] == ["reproduced"] * 3


@pytest.mark.parametrize(
    ("stated", "computed", "other", "expected"),
    [
        ("320 KB", 327_680, (), "reproduced-with-unit-note"),  # KiB
        ("40 GB", 40 * 2**30, (), "reproduced-with-unit-note"),  # GiB
        ("2.5 MB", 2_621_440, (), "reproduced-with-unit-note"),  # MiB
        ("10.5 GB", 10_737_418_240, (10_485_760_000,), "reproduced-with-unit-note"),  # k = 1,000
        ("9.77 GB", 10_737_418_240, (10_485_760_000,), "reproduced-with-unit-note"),  # both at once
        ("320 KiB", 327_680, (), "reproduced"),
        ("320 KiB", 320_000, (), "imprecise"),  # a binary unit has no decimal reading
        ("1.7 ms", 0.00179, (0.00175,), "reproduced-with-unit-note"),
        ("30 %", 0.3, (), "reproduced"),
        ("47 billion", 39.2e9, (), "wrong"),
    ],
)
def test_other_units_are_a_note_and_no_excuse(stated, computed, other, expected) -> None:
    assert verdict(stated, computed, *other) == expected


def test_zero_is_wrong_for_anything_else() -> None:
    assert verdict("7-8 requests", 0) == "wrong" and verdict("0", 0) == "reproduced"


def test_a_claim_is_as_good_as_its_worst_figure() -> None:
    assert worst(["reproduced", "wrong", "imprecise"]) == "wrong"
    assert worst(["reproduced-with-unit-note", "reproduced"]) == "reproduced-with-unit-note"
    assert worst(["imprecise", "reproduced-with-unit-note"]) == "imprecise"
