"""Reading /metrics: sums over labels, growth over a restart, quantiles as Prometheus computes them."""

from __future__ import annotations

import math

import pytest

from kvlab.lab.scrape import Scrape, difference, grown, quantile, scrape

TEXT = """\
# HELP vllm:num_preemptions_total Preemptions.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
vllm:num_preemptions_total{engine="1",model_name="m"} 4.0
# TYPE t histogram
t_bucket{engine="0",le="0.1"} 2.0
t_bucket{engine="0",le="0.5"} 8.0
t_bucket{engine="0",le="+Inf"} 10.0
t_count{engine="0"} 10.0
t_sum{engine="0"} 4.0
"""


def test_totals_sum_over_the_labels_that_are_not_asked_for():
    look = Scrape.of(TEXT)
    assert look.total("vllm:num_preemptions_total") == 7
    assert look.total("vllm:num_preemptions_total", engine="1") == 4
    assert look.total("vllm:nothing") is None
    assert look.values("vllm:num_preemptions_total", "engine") == {"0": 3, "1": 4}


def test_growth_is_the_difference_and_counts_from_zero_after_a_restart():
    early, late = Scrape.of(TEXT), Scrape.of(TEXT.replace("} 3.0", "} 9.0"))
    assert grown(early, late, "vllm:num_preemptions_total") == 6
    assert grown(late, early, "vllm:num_preemptions_total") == 7
    assert grown(None, early, "vllm:num_preemptions_total") == 7
    assert grown(early, late, "vllm:nothing") is None


def test_quantiles_are_linear_within_a_bucket():
    buckets = Scrape.of(TEXT).buckets("t")
    assert buckets == [(0.1, 2.0), (0.5, 8.0), (math.inf, 10.0)]
    assert quantile(buckets, 0.1) == pytest.approx(0.05)
    assert quantile(buckets, 0.5) == pytest.approx(0.1 + 0.4 * 3 / 6)
    # beyond every bound only the last one is known
    assert quantile(buckets, 0.95) == 0.5
    assert quantile([], 0.5) is None and quantile([(0.1, 0.0), (math.inf, 0.0)], 0.5) is None


def test_difference_is_what_was_observed_in_between():
    early, late = Scrape.of(TEXT), Scrape.of(TEXT.replace("8.0", "12.0").replace("10.0", "15.0"))
    assert difference(early, late, "t") == [(0.1, 0.0), (0.5, 4.0), (math.inf, 5.0)]
    assert difference(None, early, "t") == early.buckets("t")


def test_address_must_be_http():
    with pytest.raises(ValueError, match="must begin with http"):
        scrape("file:///etc/passwd")
