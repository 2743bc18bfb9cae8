"""Every metric of a server: name, type, help, buckets. Counters get `_total` when they are written out."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvlab.engine import Engine
from kvlab.serve import buckets

LABELS = ("model_name", "engine")

COUNTERS = {
    "prefix_queries": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", ()),
    "prefix_hits": ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", ()),
    "preemptions": ("vllm:num_preemptions", "Running requests that lost their pages.", ()),
    "prompt_tokens": ("vllm:prompt_tokens", "Prompt tokens of requests that got a first token.", ()),
    "prompt_by_source": (
        "vllm:prompt_tokens_by_source", "Prompt tokens of requests that got a first token, by where they came from.",
        ("source",),
    ),
    "external_queries": (
        "vllm:external_prefix_cache_queries", "Prompt tokens looked up in host memory and on disk.", ()
    ),
    "external_hits": ("vllm:external_prefix_cache_hits", "Prompt tokens found there.", ()),
    "prompt_tokens_cached": ("vllm:prompt_tokens_cached", "Prompt tokens that were not computed again.", ()),
    "cached_by_source": (
        "vllm:prompt_tokens_cached_by_source", "Prompt tokens that were not computed again, by where they were found.",
        ("source",),
    ),
    "generation_tokens": ("vllm:generation_tokens", "Tokens generated.", ()),
    "success": ("vllm:request_success", "Requests that ended, by how.", ("finished_reason",)),
    "corrupted": ("vllm:corrupted_requests", "Requests that ended because a number in them was not finite.", ()),
    "rejections": ("vllm:admission_rejections", "Requests turned away.", ("reason",)),
    "drafts": ("vllm:spec_decode_num_drafts", "Drafts proposed.", ()),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Tokens drafted.", ()),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were right.", ()),
    "accepted_at": (
        "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafted tokens that were right, by position.", ("position",)
    ),
    "preempted_tokens": ("kvlab:preempted_tokens", "Computed tokens thrown away by preemptions.", ()),
}  # fmt: skip

GAUGES = {
    "running": ("vllm:num_requests_running", "Requests that hold pages and get tokens."),
    "waiting": ("vllm:num_requests_waiting", "Requests that wait to run."),
}

HISTOGRAMS = {
    "ttft": ("vllm:time_to_first_token_seconds", "From arrival to the first token.", buckets.TTFT_S),
    "inter_token": ("vllm:inter_token_latency_seconds", "Between two tokens of a request.", buckets.ITL_S),
    "time_per_output_token": (
        "vllm:request_time_per_output_token_seconds", "A request's mean time per token after the first.", buckets.ITL_S
    ),
    "e2e": ("vllm:e2e_request_latency_seconds", "From arrival to the end.", buckets.LATENCY_S),
    "queue_time": ("vllm:request_queue_time_seconds", "From arrival to the first admission.", buckets.LATENCY_S),
    "inference_time": ("vllm:request_inference_time_seconds", "From the first admission to the end.", buckets.LATENCY_S),
    "prefill_time": (
        "vllm:request_prefill_time_seconds", "From the first admission to the first token.", buckets.LATENCY_S
    ),
    "decode_time": ("vllm:request_decode_time_seconds", "From the first token to the last.", buckets.LATENCY_S),
    "iteration_tokens": ("vllm:iteration_tokens_total", "Tokens of a step.", buckets.ITERATION_TOKENS),
    "params_n": ("vllm:request_params_n", "Completions asked for of a prompt.", buckets.CHOICES),
    "request_preemptions": ("vllm:request_num_preemptions", "Preemptions of a request.", buckets.PREEMPTIONS),
}  # fmt: skip

TOKEN_HISTOGRAMS = {
    "request_prompt": ("vllm:request_prompt_tokens", "Prompt tokens of a request."),
    "request_generation": ("vllm:request_generation_tokens", "Tokens generated for a request."),
    "max_generation": (
        "vllm:request_max_num_generation_tokens", "Tokens of the longest completion of a prompt."
    ),
    "params_max_tokens": ("vllm:request_params_max_tokens", "Tokens that a request was allowed to generate."),
    "prefill_computed": (
        "vllm:request_prefill_kv_computed_tokens", "Tokens computed before a request's first token, hits left out."
    ),
}  # fmt: skip


class Instruments:
    """The metrics of one engine, as attributes by the names above, labels of model and engine filled in.

    Args:
        registry: of this engine.
        model_name: the label.
        engine: asked by the pool's gauges when somebody scrapes.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, engine: Engine) -> None:
        self._registry, self._own = registry, {"model_name": model_name, "engine": "0"}
        for key, (name, about, labels) in COUNTERS.items():
            setattr(self, key, self._make(Counter, name, about, labels))
        for key, (name, about) in GAUGES.items():
            setattr(self, key, self._make(Gauge, name, about))
        for key, (name, about, bounds) in HISTOGRAMS.items():
            setattr(self, key, self._make(Histogram, name, about, buckets=bounds))
        bounds = buckets.tokens_up_to(engine.limits.max_model_len)
        for key, (name, about) in TOKEN_HISTOGRAMS.items():
            setattr(self, key, self._make(Histogram, name, about, buckets=bounds))
        self.ttft_by_context = self._make(
            Histogram, "kvlab:time_to_first_token_seconds", "As vllm:time_to_first_token_seconds, by prompt tokens.",
            ("context",), buckets=buckets.TTFT_S,
        )  # fmt: skip
        self.waiting_by_reason = self._make(
            Gauge, "vllm:num_requests_waiting_by_reason", "Requests that wait to run, by what for.", ("reason",)
        )
        self._pool_gauges(engine)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no metric {name!r}")

    def _make(self, kind: type, name: str, about: str, labels: tuple[str, ...] = (), **more: Any) -> _Bound | Any:
        metric = kind(name, about, (*LABELS, *labels), registry=self._registry, **more)
        return _Bound(metric, self._own, labels) if labels else metric.labels(**self._own)

    def _pool_gauges(self, engine: Engine) -> None:
        usage = self._make(Gauge, "vllm:kv_cache_usage_perc", "Share of the pool's pages that requests hold; 1 is all.")
        usage.set_function(lambda: usage_of(engine))
        held = self._make(Gauge, "kvlab:kv_held_bytes", "Bytes of the pages that requests hold.")
        held.set_function(lambda: engine.cache.held_bytes)
        pool = self._make(Gauge, "kvlab:kv_pool_bytes", "Bytes of the pool.")
        pool.set(engine.kv.allocated_bytes)
        facts = {
            "block_size": str(engine.options.block_size),
            "num_gpu_blocks": str(sum(engine.num_blocks)),
            "cache_dtype": engine.kv_dtype,
            "enable_prefix_caching": str(bool(getattr(engine.options, "prefix", None))),
        }
        info = self._make(Gauge, "vllm:cache_config_info", "How the cache is set up.", tuple(facts))
        info.labels(*facts.values()).set(1)


class _Bound:
    """A metric whose own labels are filled in and others are left."""

    def __init__(self, metric: Any, own: dict[str, str], names: tuple[str, ...]) -> None:
        self._metric, self._own, self._names = metric, own, names

    def labels(self, *values: str) -> Any:
        """The series of these values of the remaining labels."""
        return self._metric.labels(**self._own, **dict(zip(self._names, values, strict=True)))


def usage_of(engine: Engine) -> float:
    """Share of the pools' bytes, null units left out, that requests hold."""
    sizes = engine.layout.unit_bytes
    total = sum((n - 1) * size for n, size in zip(engine.num_blocks, sizes, strict=True))
    return engine.cache.held_bytes / total
