"""Dates read from arXiv numbers."""

import pytest

from kvlab.book.history import arxiv_month, month_text, reports, works
from kvlab.specs import catalogue


def test_a_number_says_its_month():
    assert month_text(arxiv_month("2309.06180")) == "2023-09"
    assert month_text(arxiv_month("0704.0001")) == "2007-04"


@pytest.mark.parametrize("number", ["2313.00001", "2300.00001", "230906180", "2309.1", "cs/0112017", ""])
def test_what_is_no_number_is_refused(number):
    with pytest.raises(ValueError, match=r"must be YYMM\.NNNNN"):
        arxiv_month(number)


def test_a_range_that_holds_the_month_is_right_and_others_count_to_its_near_end():
    off = {work.name: work.months_off for work in works()}
    assert off["MQA"] == 0 and off["PagedAttention"] == 1  # September against October 2023
    assert off["NSA"] == 8  # February against October to December 2025


def test_every_model_on_the_time_axis_is_in_the_catalogue():
    assert {name for name, _ in reports()} <= set(catalogue.names())
    assert [month for _, month in reports()] == sorted(month for _, month in reports())
