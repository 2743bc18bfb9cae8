"""The dashboard's four metrics, from expositions written here: kvlab's and a vLLM's, which has no context buckets."""

from __future__ import annotations

import pytest

from kvlab.book.dashboard import Tail, Watch, four, rates, series, show_four, show_looks
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


# a vLLM's, as it writes them out: two engines of one model, the client library's and the web framework's own series among
# them, names that nobody here serves, values that are no number, a line in no format at all
VLLM = """\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{{generation="0"}} 12793.0
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.76e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="org/A \\"B\\""}} {running}
vllm:num_requests_running{{engine="1",model_name="org/A \\"B\\""}} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="org/A \\"B\\""}} 0.0
vllm:engine_sleep_state{{engine="0",model_name="org/A \\"B\\"",sleep_state="awake"}} 1.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="org/A \\"B\\""}} {usage}
vllm:kv_cache_usage_perc{{engine="1",model_name="org/A \\"B\\""}} 0.5
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{{engine="0",model_name="org/A \\"B\\""}} {queries}
vllm:prefix_cache_queries_total{{engine="1",model_name="org/A \\"B\\""}} 40.0
# TYPE vllm:prefix_cache_queries_created gauge
vllm:prefix_cache_queries_created{{engine="0",model_name="org/A \\"B\\""}} 1.76e+09
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{{engine="0",model_name="org/A \\"B\\""}} {hits}
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{engine="0",model_name="org/A \\"B\\""}} {preemptions}
# TYPE vllm:request_success_total counter
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="org/A \\"B\\""}} 7.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",cache_dtype="auto",engine="0",gpu_memory_utilization="0.9",num_gpu_blocks="27000"}} 1.0
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{{max_lora="0",running_lora_adapters="",waiting_lora_adapters=""}} 1.76e+09
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.1",model_name="org/A \\"B\\""}} {fast}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.5",model_name="org/A \\"B\\""}} {all}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="org/A \\"B\\""}} {all}
vllm:time_to_first_token_seconds_count{{engine="0",model_name="org/A \\"B\\""}} {all}
vllm:time_to_first_token_seconds_sum{{engine="0",model_name="org/A \\"B\\""}} 3.5
# TYPE vllm:something_new unheard_of
vllm:something_new{{engine="0"}} NaN
# TYPE http_request_duration_seconds summary
http_request_duration_seconds{{handler="/v1/completions",quantile="0.5"}} 0.25 1760000000000
{more}"""
ODD = ("", "not a line of any format\n", "# TYPE x\n", "broken{{ 1\n", "single{{quotes='1'}} 2\n")
AT = {"usage": 0.1, "preemptions": 1, "queries": 100, "hits": 10, "fast": 2, "all": 4, "running": 3}
THEN = {"usage": 0.7, "preemptions": 5, "queries": 200, "hits": 60, "fast": 6, "all": 12, "running": 5}


@pytest.mark.parametrize("more", ODD)
def test_a_vllms_own_endpoint_is_read_whatever_else_stands_there(more, capsys):
    early, late = (Scrape.of(VLLM.format(**v, more=more.format()), at) for v, at in ((AT, 1.0), (THEN, 3.0)))
    found = four(early, late)
    # a share is no sum: the mean of both engines; counters are summed over them
    assert (found.usage, found.evictions_per_s, found.hit_rate) == (pytest.approx(0.6), 2.0, 50 / 100)
    assert found.ttft == {"all": Tail(8, pytest.approx(0.1), pytest.approx(0.1 + 0.4 * (7.6 - 4) / 4))}
    assert series([early, late], "vllm:kv_cache_usage_perc") == [pytest.approx(0.3), pytest.approx(0.6)]
    assert series([early, late], "vllm:num_requests_running") == [5, 7]
    assert late.values("vllm:num_requests_running", "model_name") == {'org/A "B"': 7}
    show_four(found, "of a vLLM")
    show_looks([early, late], "of a vLLM")


def test_an_answer_without_a_metric_is_an_error_and_a_watch_goes_on(monkeypatch):
    with pytest.raises(ValueError, match="the answer is no exposition of metrics"):
        Scrape.of("<html>bad gateway</html>")
    answers = iter([Scrape.of("up 1\n"), ValueError("no exposition"), OSError("refused")])

    def look_once(url: str) -> Scrape:
        found = next(answers, Scrape.of("up 1\n"))
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("kvlab.book.dashboard.scrape", look_once)
    with Watch("http://x", every=0.001) as watch:
        while len(watch.looks) < 3:
            pass
    assert watch.missed == 2
