"""The dashboard's four metrics, from expositions written here: kvlab's and a vLLM's, which has no context buckets."""

from __future__ import annotations

import pytest

from kvlab.book.dashboard import Tail, four, rates, series
from kvlab.lab.scrape import Scrape

HEAD = """\
vllm:kv_cache_usage_perc{{engine="0"}} {usage}
vllm:num_preemptions_total{{engine="0"}} {preemptions}
vllm:prefix_cache_queries_total{{engine="0"}} {queries}
vllm:prefix_cache_hits_total{{engine="0"}} {hits}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.1"}} {fast}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.5"}} {all}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf"}} {all}
"""
CONTEXT = """\
kvlab:time_to_first_token_seconds_bucket{{context="{context}",le="0.1"}} {fast}
kvlab:time_to_first_token_seconds_bucket{{context="{context}",le="0.5"}} {all}
kvlab:time_to_first_token_seconds_bucket{{context="{context}",le="+Inf"}} {all}
kvlab:time_to_first_token_seconds_count{{context="{context}"}} {all}
"""


def look(at: float, **values) -> Scrape:
    return Scrape.of(HEAD.format(**values), at)


EARLY = {"usage": 0.9, "preemptions": 3, "queries": 1000, "hits": 900, "fast": 8, "all": 10}
LATE = {"usage": 0.25, "preemptions": 13, "queries": 1200, "hits": 950, "fast": 18, "all": 30}


def test_rates_are_of_the_time_between_two_looks():
    found = four(look(10.0, **EARLY), look(14.0, **LATE))
    assert (found.usage, found.evictions_per_s, found.hit_rate) == (0.25, 2.5, 50 / 200)
    # ten up to 0.1 s and ten up to 0.5 s came in between
    assert found.ttft == {"all": Tail(20, 0.1, pytest.approx(0.1 + 0.4 * 9 / 10))}


def test_without_an_earlier_look_there_is_no_rate_and_everything_counts():
    found = four(None, look(14.0, **LATE))
    assert found.evictions_per_s is None and found.hit_rate == 950 / 1200 and found.ttft["all"].count == 30


def test_context_buckets_stand_in_the_order_of_length():
    text = HEAD.format(**LATE) + "".join(
        CONTEXT.format(context=c, fast=f, all=n) for c, f, n in (("129-512", 0, 4), ("0-128", 6, 6), ("131073+", 1, 2))
    )
    found = four(None, Scrape.of(text, 0.0))
    assert list(found.ttft) == ["all", "0-128", "129-512", "131073+"]
    assert found.ttft["0-128"].p95 <= 0.1 < found.ttft["129-512"].p50


def test_endpoint_that_tells_nothing_is_none_throughout():
    found = four(None, Scrape.of("up 1\n", 0.0))
    assert (found.usage, found.evictions_per_s, found.hit_rate, found.ttft) == (None, None, None, {})


def test_series_and_rates_follow_the_looks():
    looks = [look(0.0, **EARLY), look(2.0, **LATE), look(4.0, **(LATE | {"preemptions": 14}))]
    assert series(looks, "vllm:kv_cache_usage_perc") == [0.9, 0.25, 0.25]
    assert rates(looks, "vllm:num_preemptions_total") == [5.0, 0.5]
