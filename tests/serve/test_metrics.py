"""/metrics against counts made by hand from a scripted engine, and its names and types against vLLM's."""

from __future__ import annotations

import speaking
from prometheus_client.parser import text_string_to_metric_families

from kvlab.cache.prefix import PrefixOptions
from kvlab.engine import SamplingParams
from kvlab.engine.tiers import TierOptions
from kvlab.schedule import Event
from kvlab.schedule.spared import SOURCES
from kvlab.serve.buckets import context_label, tokens_up_to
from kvlab.serve.metrics import PROMPT_SOURCES, EngineMetrics

# every name of vLLM 0.33 (v1/metrics/loggers.py, perf.py, v1/spec_decode/metrics.py), as they are written out
VLLM = {
    "gauge": {
        "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "num_requests_kv_fetch_by_stage",
        "engine_sleep_state", "kv_cache_usage_perc", "lora_requests_info", "cache_config_info",
    },
    "counter": {
        "prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries", "external_prefix_cache_hits",
        "mm_cache_queries", "mm_cache_hits", "num_preemptions", "prompt_tokens", "prompt_tokens_by_source",
        "prompt_tokens_cached", "prompt_tokens_cached_by_source", "generation_tokens", "request_success",
        "admission_rejections", "corrupted_requests", "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos", "estimated_flops_per_gpu",
        "estimated_read_bytes_per_gpu", "estimated_write_bytes_per_gpu",
    },
    "histogram": {
        "request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total", "request_max_num_generation_tokens",
        "request_params_n", "request_params_max_tokens", "time_to_first_token_seconds", "inter_token_latency_seconds",
        "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
        "request_num_preemptions", "request_prefill_kv_computed_tokens", "kv_block_lifetime_seconds",
        "kv_block_idle_before_evict_seconds", "kv_block_reuse_gap_seconds",
    },
}  # fmt: skip
LEFT_OUT = {
    "num_requests_kv_fetch_by_stage": "tiers fetch in one stage; kvlab's events swap_in and load tell of it",
    "engine_sleep_state": "the engine does not sleep",
    "lora_requests_info": "adapters are added in Python, no request of the server asks for one",
    "mm_cache_queries": "text only", "mm_cache_hits": "text only",
    "estimated_flops_per_gpu": "kvlab plan and simulate estimate; a server tells what it measured",
    "estimated_read_bytes_per_gpu": "as the operations", "estimated_write_bytes_per_gpu": "as the operations",
    "kv_block_lifetime_seconds": "events count pages and do not name them; vLLM has these off unless asked",
    "kv_block_idle_before_evict_seconds": "as the lifetime", "kv_block_reuse_gap_seconds": "as the lifetime",
}  # fmt: skip


def families(metrics: EngineMetrics) -> dict:
    return {f.name: f for f in text_string_to_metric_families(metrics.exposition()[0].decode())}


def samples(metrics: EngineMetrics) -> dict[tuple, float]:
    """(name, own labels) -> value."""
    own = {"model_name", "engine"}
    return {
        (s.name, *(v for k, v in sorted(s.labels.items()) if k not in own)): s.value
        for family in families(metrics).values() for s in family.samples
    }  # fmt: skip


class Scripted:
    """A metrics sink that hears what a test says."""

    def __init__(self, **options) -> None:
        self.metrics = EngineMetrics(speaking.engine(**options), "tiny")

    def say(self, now: float, kind: str, request_id: str = "a", reason: str = "", **counts: int) -> None:
        self.metrics.hear(Event(counts.pop("step", 0), now, kind, request_id, reason, **counts))

    def value(self, *key: str) -> float:
        return samples(self.metrics)[key]


def test_names_and_types_are_vllms_all_but_those_with_a_reason():
    found = families(EngineMetrics(speaking.engine(), "tiny"))
    # the parser takes `_total` off counters' names, and off no histogram's; `_created` is the client library's, as in vLLM
    own = {name: f for name, f in found.items() if name.startswith("vllm:") and not name.endswith("_created")}
    served = {name.removeprefix("vllm:"): family.type for name, family in own.items()}
    known = {name: kind for kind, names in VLLM.items() for name in names}
    assert set(LEFT_OUT) <= set(known) and all(LEFT_OUT.values())
    assert served == {name: kind for name, kind in known.items() if name not in LEFT_OUT}


def test_nothing_carries_a_name_that_vllm_dropped():
    text = EngineMetrics(speaking.engine(), "tiny").exposition()[0].decode()
    gone = ("gpu_cache_usage_perc", "gpu_prefix_cache", "vllm:time_per_output_token_seconds", "requests_swapped")
    assert not [name for name in gone if name in text]


def test_every_series_says_model_and_engine():
    found = families(EngineMetrics(speaking.engine(), "tiny"))
    labels = [s.labels for family in found.values() for s in family.samples]
    assert len(labels) > 100 and all(own["model_name"] == "tiny" and own["engine"] == "0" for own in labels)


def test_one_request_by_hand():
    script = Scripted()
    script.say(10.0, "arrive", tokens=300)
    assert script.value("vllm:num_requests_waiting") == 1
    assert script.value("vllm:num_requests_waiting_by_reason", "capacity") == 1
    assert script.value("vllm:num_requests_waiting_by_reason", "deferred") == 0
    script.say(10.5, "admit", tokens=300)
    script.say(10.5, "chunk", step=1, tokens=200)
    script.say(11.0, "chunk", step=2, tokens=100)
    script.say(12.0, "token", step=2, tokens=7)
    script.say(12.25, "token", step=3, tokens=7)
    script.say(12.75, "token", step=4, tokens=7)
    assert (script.value("vllm:num_requests_waiting"), script.value("vllm:num_requests_running")) == (0, 1)
    script.say(12.75, "finish", reason="length: 303 tokens", tokens=303, pages=9)
    assert script.value("vllm:time_to_first_token_seconds_sum") == 2.0
    assert script.value("kvlab:time_to_first_token_seconds_sum", "129-512") == 2.0
    assert script.value("vllm:inter_token_latency_seconds_sum") == 0.75
    assert script.value("vllm:inter_token_latency_seconds_count") == 2
    assert script.value("vllm:request_time_per_output_token_seconds_sum") == 0.375
    assert script.value("vllm:request_queue_time_seconds_sum") == 0.5
    assert script.value("vllm:request_prefill_time_seconds_sum") == 1.5
    assert script.value("vllm:request_decode_time_seconds_sum") == 0.75
    assert script.value("vllm:e2e_request_latency_seconds_sum") == 2.75
    assert script.value("vllm:request_prefill_kv_computed_tokens_sum") == 300
    assert script.value("vllm:prompt_tokens_total") == 300 and script.value("vllm:generation_tokens_total") == 3
    assert script.value("vllm:request_success_total", "length") == 1
    assert script.value("vllm:prompt_tokens_by_source_total", "local_compute") == 300
    assert script.value("vllm:request_max_num_generation_tokens_sum") == 3
    assert script.value("vllm:request_params_n_sum") == script.value("vllm:request_params_n_count") == 1
    assert script.value("vllm:corrupted_requests_total") == 0
    # the last step's tokens are counted once another step begins
    assert script.value("vllm:iteration_tokens_total_sum") == 200
    assert script.value("vllm:num_requests_running") == 0


def test_preempted_request_waits_again_and_has_one_first_token():
    script = Scripted()
    script.say(0.0, "arrive", tokens=8)
    script.say(1.0, "admit", tokens=8)
    script.say(1.5, "token", step=1, tokens=3)
    script.say(2.0, "preempt", tokens=9, pages=3)
    assert (script.value("vllm:num_requests_waiting"), script.value("vllm:num_requests_running")) == (1, 0)
    script.say(3.0, "admit", tokens=9)
    script.say(4.0, "token", step=2, tokens=5)
    script.say(4.0, "finish", reason="stop: token 5", tokens=10)
    assert script.value("vllm:num_preemptions_total") == 1 and script.value("kvlab:preempted_tokens_total") == 9
    assert script.value("vllm:request_num_preemptions_sum") == 1
    assert script.value("vllm:request_queue_time_seconds_count") == 1
    assert script.value("vllm:time_to_first_token_seconds_count") == 1
    # the wait after the preemption is a gap between two tokens
    assert script.value("vllm:inter_token_latency_seconds_sum") == 2.5


def test_hits_count_once_however_many_chunks_and_admissions_a_prompt_takes():
    script = Scripted(prefix=PrefixOptions())
    script.say(0.0, "arrive", tokens=100)
    script.say(1.0, "hit", tokens=48)
    script.say(1.0, "admit", tokens=52)
    for step in range(3):
        script.say(1.0, "chunk", step=step, tokens=16)
    script.say(2.0, "preempt", tokens=96)
    script.say(3.0, "hit", tokens=96)
    script.say(3.0, "admit", tokens=4)
    script.say(4.0, "token", tokens=1)
    assert script.value("vllm:prefix_cache_hits_total") == script.value("vllm:prompt_tokens_cached_total") == 48
    assert script.value("vllm:prefix_cache_queries_total") == 100


def test_tokens_of_one_step_are_one_gap():
    """As vLLM (v1/metrics/stats.py, update_from_output): right drafts come at once, and no gap of 0 is counted."""
    script = Scripted()
    script.say(0.0, "arrive", tokens=8)
    script.say(0.0, "admit", tokens=8)
    for now, step, count in ((1.0, 1, 2), (1.5, 2, 4), (2.5, 3, 1)):
        for _ in range(count):
            script.say(now, "token", step=step, tokens=7)
    script.say(2.5, "finish", reason="length: 15 tokens", tokens=15)
    assert script.value("vllm:inter_token_latency_seconds_count") == 2
    assert script.value("vllm:inter_token_latency_seconds_sum") == 1.5
    assert script.value("vllm:generation_tokens_total") == 7
    assert script.value("vllm:request_time_per_output_token_seconds_sum") == 0.25


def test_every_place_that_spared_tokens_is_counted_and_the_sum_is_all(tmp_path):
    """A prompt from the pool, from host memory, from disk; what came from nowhere is in none of them."""
    tiers = TierOptions(1 << 20, tmp_path, 1 << 22)
    prompt, one = list(range(20)), SamplingParams(max_tokens=1)
    first = speaking.engine(tiers=tiers, prefix=PrefixOptions())
    metrics = EngineMetrics(first, "tiny")
    first.generate([prompt], one)
    first.generate([prompt], one)
    first.cache.prefix.clear()
    first.generate([[*prompt, 7]], one)
    second = speaking.engine(tiers=tiers, prefix=PrefixOptions())
    other = EngineMetrics(second, "tiny")
    second.generate([prompt], one)
    found = {engine: {s: samples(engine)["vllm:prompt_tokens_cached_by_source_total", s] for s in SOURCES}
             for engine in (metrics, other)}  # fmt: skip
    assert found[metrics] == {"device": 16, "host": 20, "disk": 0} and found[other] == {
        "device": 0,
        "host": 0,
        "disk": 16,
    }
    for engine, own in found.items():
        assert samples(engine)["vllm:prompt_tokens_cached_total",] == sum(own.values())
        totals = samples(engine)
        assert totals["vllm:prefix_cache_hits_total",] == own["device"]
        # vLLM's words for the same: computed here, found here, brought here
        by_source = {s: totals["vllm:prompt_tokens_by_source_total", s] for s in PROMPT_SOURCES}
        prompts, below = totals["vllm:prompt_tokens_total",], own["host"] + own["disk"]
        computed = prompts - own["device"] - below
        assert by_source == dict(zip(PROMPT_SOURCES, (computed, own["device"], below), strict=True))
        assert totals["vllm:external_prefix_cache_hits_total",] == below
        assert totals["vllm:external_prefix_cache_queries_total",] == prompts - own["device"]


def test_salts_keep_hits_apart_and_the_counters_say_so():
    """A tenant's prompt is no hit for another (CVE-2025-46570)."""
    engine = speaking.engine(prefix=PrefixOptions())
    metrics = EngineMetrics(engine, "tiny")
    for salt in ("a", "b", "a"):
        engine.add_request(list(range(20)), SamplingParams(max_tokens=1), salt=salt)
        while engine.requests:
            engine.step()
    found = samples(metrics)
    assert (found["vllm:prefix_cache_queries_total",], found["vllm:prefix_cache_hits_total",]) == (60, 16)


def test_drafts_count_by_position():
    script = Scripted()
    for right in (3, 0, 1):
        script.say(0.0, "draft", tokens=4)
        script.say(0.0, "accept", tokens=right)
    assert script.value("vllm:spec_decode_num_drafts_total") == 3
    assert script.value("vllm:spec_decode_num_draft_tokens_total") == 12
    assert script.value("vllm:spec_decode_num_accepted_tokens_total") == 4
    by_position = [script.value("vllm:spec_decode_num_accepted_tokens_per_pos_total", str(p)) for p in range(3)]
    assert by_position == [2, 1, 1]


def test_request_aborted_while_it_waits_leaves_the_queue():
    script = Scripted()
    script.say(0.0, "arrive", tokens=8)
    script.say(1.0, "finish", reason="abort: asked for", tokens=8)
    assert script.value("vllm:num_requests_waiting") == 0
    assert script.value("vllm:request_success_total", "abort") == 1


def test_completions_of_one_prompt_count_once_when_the_last_has_ended():
    engine = speaking.engine()
    metrics = EngineMetrics(engine, "tiny")
    ids = [engine.add_request([1, 2], SamplingParams(n, ignore_eos=True)) for n in (3, 7, 5)]
    metrics.together(ids[:2])
    metrics.together(ids[2:])

    def told(name: str) -> float:
        return metrics.registry.get_sample_value(f"vllm:request_{name}", {"model_name": "tiny", "engine": "0"})

    seen = []
    while engine.requests:
        engine.step()
        seen.append((told("params_n_count"), told("params_n_sum")))
    # the prompt of two when its second completion has seven tokens, after the prompt of one had its five
    assert seen == [(0, 0)] * 4 + [(1, 1)] * 2 + [(2, 3)]
    assert (told("max_num_generation_tokens_sum"), told("params_max_tokens_sum")) == (7 + 5, 3 + 7 + 5)


def test_what_a_request_was_allowed_is_told_however_it_ends():
    engine = speaking.engine()
    metrics = EngineMetrics(engine, "tiny")
    name = engine.add_request([1, 2], SamplingParams(50, ignore_eos=True))
    engine.step()
    engine.abort(name)
    assert samples(metrics)["vllm:request_params_max_tokens_sum",] == 50


def test_a_request_whose_numbers_are_not_finite_is_corrupted():
    engine = speaking.engine()
    metrics = EngineMetrics(engine, "tiny")
    name = engine.add_request([1, 2, 3], SamplingParams(9, ignore_eos=True))
    engine.step()
    for parts in engine.storage.views(engine.spec):
        for view in parts:
            view.v[engine.cache.tables[name][0][0]] = float("nan")
    while engine.requests:
        engine.step()
    found = samples(metrics)
    assert found["vllm:corrupted_requests_total",] == found["vllm:request_success_total", "error"] == 1


def test_the_engines_own_events_give_the_same_totals():
    engine = speaking.engine()
    metrics = EngineMetrics(engine, "tiny")
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (5, 9, 3)]
    request = engine.add_request([1, 2, 3], params[0])
    while len(engine.requests[request].tokens) < 6:
        engine.step()
    # one request in 2 of the 64 pages of 4 tokens
    assert (
        samples(metrics)["vllm:kv_cache_usage_perc",] == 2 / 64 == engine.cache.held_bytes / (64 * 4 * 2 * 2 * 2 * 48)
    )
    while engine.requests:
        engine.step()
    engine.generate([[4] * 7, [5] * 2], params[1:])
    found = samples(metrics)
    assert found["vllm:generation_tokens_total",] == 17 and found["vllm:prompt_tokens_total",] == 12
    assert found["vllm:request_success_total", "length"] == 3
    assert found["vllm:kv_cache_usage_perc",] == 0
    assert found["vllm:num_requests_running",] == found["vllm:num_requests_waiting",] == 0
    assert found["vllm:inter_token_latency_seconds_count",] == 17 - 3


def test_two_engines_count_apart():
    first, second = (EngineMetrics(speaking.engine(), "tiny") for _ in range(2))
    first.engine.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert samples(first)["vllm:generation_tokens_total",] == 2
    assert samples(second)["vllm:generation_tokens_total",] == 0


def test_context_buckets_meet_without_gap_or_overlap():
    edges = [context_label(n) for n in (1, 128, 129, 512, 513, 8192, 8193, 131072, 131073)]
    assert edges == ["0-128", "0-128", "129-512", "129-512", "513-2048", "2049-8192", "8193-32768", "32769-131072",
                     "131073+"]  # fmt: skip


def test_token_buckets_go_1_2_5_up_to_the_longest():
    assert tokens_up_to(256) == (1, 2, 5, 10, 20, 50, 100, 200)
