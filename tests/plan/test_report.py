"""The text of a plan: every step of the derivation is there, exact, and fits a terminal."""

import re

import pytest

from kvlab.plan import make_plan
from kvlab.plan.report import exact, tokens_text


def test_the_derivation_of_llama_3_70b_reads_as_on_paper():
    text = make_plan("llama-3-70b", context="32k", tp=4, weight_dtype="fp8").explain()
    for line in (
        "2 (K, V) x 80 layers x 8 KV heads x 128 x 2 bytes = 327,680 bytes per token",
        "2. One sequence of 32k = 32,768 tokens",
        "full attention  327,680 x 32,768  = 10,737,418,240",
        "= 10,737,418,240 bytes (10.00 GiB), 10.74 GB",
        "full attention: 8 KV heads over 4 ranks, 2 on each",
        "= 2,684,354,560 bytes (2.50 GiB) per sequence",
        "memory: driver, 81,559 MiB",
        "free for the cache",
        "bound by reading weights",
    ):
        assert line in text


def test_each_kind_of_layer_has_its_own_term():
    text = make_plan("gpt-oss-20b", context=1000).explain()
    assert "sliding window, the last 128 tokens:" in text
    assert "24,576 x min(1,000, 128)  = 3,145,728" in text
    assert "24,576 x 1,000            = 24,576,000" in text
    assert "= 27,721,728 bytes" in text
    assert "In two numbers: 3,145,728 bytes per request and 24,576 per token" in text


def test_reserve_over_half_is_flagged():
    text = make_plan("gpt-oss-20b", policy="paged", max_batched_tokens="8k").explain()
    assert re.search(r"group sliding128: \d+ pages x [\d,]+ bytes  over half of it is reserve", text)


def test_copies_and_weights_that_do_not_fit_are_said():
    assert "latent (MLA): held whole by every rank" in make_plan("deepseek-v3", tp=8).explain()
    copied = make_plan("llama-3-8b", tp=16).explain()
    assert "8 KV heads over 16 ranks, 1 on each, each head on 2 ranks" in copied
    assert "The weights do not fit; the weights alone need 2 of them" in make_plan("llama-3-70b").explain()


OPTIONS = [{}, {"policy": "paged", "tp": 8, "gpu": "b200"}, {"prompt": 4000, "output": 100, "kv_dtype": "int4_g32"},
           {"context": "1M", "batch": 300, "policy": "vllm", "pp": 2, "gpu": "m3-ultra"}]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("model", ["llama-3-70b", "gpt-oss-120b", "deepseek-v3", "zamba2-7b", "gemma-3-27b"])
def test_no_line_is_wider_than_80_columns(model, options):
    for line in make_plan(model, **options).explain().splitlines():
        assert len(line) <= 80, line


def test_units_never_mix():
    assert exact(327680) == "327,680 bytes (320.00 KiB)"
    assert exact(100) == "100 bytes"
    assert tokens_text(32768) == "32k = 32,768 tokens"
    assert tokens_text(2**20) == "1M = 1,048,576 tokens"
    assert (tokens_text(1000), tokens_text(1)) == ("1,000 tokens", "1 token")
    text = make_plan("llama-3-70b", context=100_000).explain()
    # 32,768,000,000 bytes: 30.52 GiB and 32.77 GB, each with its own unit
    assert "32,768,000,000 bytes (30.52 GiB), 32.77 GB" in text
    assert not re.search(r"\d [KM]B\b", text)
