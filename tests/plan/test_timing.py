"""Times: bytes and operations counted by hand or by brute force, never a clock."""

import math

import pytest

from kvlab.plan.plan import make_plan
from kvlab.plan.steps import decode_step, prefill
from kvlab.plan.timing import attention_operations, cache_read_bytes, step_time
from kvlab.specs.formats import get_format
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import (
    Attention,
    ChunkedLocal,
    CompressedEntries,
    CrossAttention,
    MLALatent,
    RecurrentState,
    Shared,
    SlidingWindow,
    StateArray,
)

BF16, FP32 = get_format("bf16"), get_format("fp32")
FULL = Attention(2, 64, 64, BF16)  # 512 bytes a token
WINDOW = SlidingWindow(2, 64, 64, BF16, window=10)
CHUNK = ChunkedLocal(2, 64, 64, BF16, chunk=6)
STATE = RecurrentState("x", (StateArray("s", ((8, 4),), 1, FP32),))


def model_of(*parts, query_heads=8):
    return ModelSpec("m", "m", tuple(LayerSpec(i, (p,)) for i, p in enumerate(parts)), 512, query_heads, 1000)


def test_a_step_reads_windows_up_to_their_size_and_moves_states_twice():
    assert cache_read_bytes(model_of(FULL), 100) == 100 * 512
    assert cache_read_bytes(model_of(WINDOW), 100) == 10 * 512
    assert cache_read_bytes(model_of(STATE), 100) == 2 * 128
    assert cache_read_bytes(model_of(CrossAttention(2, 64, 64, BF16, encoder_tokens=7)), 100) == 7 * 512


def test_a_layer_that_shares_a_cache_reads_it_again():
    assert cache_read_bytes(model_of(FULL, Shared(0), Shared(0)), 100) == 3 * 100 * 512


@pytest.mark.parametrize("part", [FULL, WINDOW, CHUNK])
@pytest.mark.parametrize("tokens", [1, 6, 9, 10, 11, 37])
def test_a_prompts_pairs_are_counted_one_by_one(part, tokens):
    def sees(query, key):
        if part is WINDOW:
            return query - 10 < key <= query
        return (query // 6 * 6 if part is CHUNK else 0) <= key <= query

    pairs = sum(sees(q, k) for q in range(tokens) for k in range(tokens))
    # scores and sums: 2 operations x 8 query heads x (64 + 64) values
    assert attention_operations(model_of(part), tokens, prompt=True) == pairs * 2 * 8 * 128


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 127])
def test_a_prompts_compressed_entries_are_counted_when_they_are_complete(tokens):
    pairs = sum((query + 1) // 4 for query in range(tokens))
    found = attention_operations(model_of(CompressedEntries(4, 64, BF16)), tokens, prompt=True)
    assert found == pairs * 2 * 8 * 128


def test_latents_are_scored_wide_in_decode_and_narrow_in_a_prompt():
    model = model_of(MLALatent(512, 64, BF16), query_heads=128)
    assert attention_operations(model, 10, prompt=False) == 10 * 2 * 128 * (576 + 512)
    assert attention_operations(model, 10, prompt=True, mla_dims=(192, 128)) == 55 * 2 * 128 * 320


def test_the_longer_of_memory_and_arithmetic_bounds_a_step():
    assert step_time(80, 20, 10, 10, 1000).bound_by == "weights"
    assert step_time(20, 80, 10, 10, 1000).bound_by == "cache"
    slow = step_time(20, 80, 10**6, 10, 1000)
    assert (slow.bound_by, slow.seconds, slow.memory_s) == ("compute", 1000.0, 10.0)
    unknown = step_time(20, 80, 10**6, 10, None)
    assert (unknown.compute_s, unknown.seconds) == (None, 10.0)


LLAMA = {
    "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}  # fmt: skip


def test_llama_70b_in_fp8_decodes_at_the_bandwidth():
    plan = make_plan(LLAMA, weight_dtype="fp8", kv_dtype="fp8", gpu="h100", context="32k")
    layer = 8192 * 8192 * 2 + 8192 * 1024 * 2 + 3 * 8192 * 28672 + 2 * 8192
    read = 80 * layer + 8192 + 128256 * 8192 + 8192  # all but the embedding, of which one row
    step = decode_step(plan, 1, 32768)
    assert step.weights_read_bytes == read
    assert step.cache_bytes == 32768 * 163840
    assert step.memory_s == pytest.approx((read + 32768 * 163840) / 3.35e12)
    assert step.operations == 2 * (read - 8192) + 80 * 2 * 64 * 256 * 32768
    assert decode_step(plan, 32, 32768).cache_bytes == 32 * 32768 * 163840


def test_tensor_parallel_ranks_share_the_reading():
    one, four = (make_plan(LLAMA, tp=tp, gpu="h200") for tp in (1, 4))
    a, b = decode_step(one, 4, 8192), decode_step(four, 4, 8192)
    assert b.weights_read_bytes == pytest.approx(a.weights_read_bytes / 4, abs=1)
    assert (b.cache_bytes * 4, b.operations * 4) == (a.cache_bytes, a.operations)
    assert prefill(one, 1000).operations == 4 * prefill(four, 1000).operations


def test_experts_are_read_as_often_as_a_batch_touches_them():
    mixtral = {
        "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2, "sliding_window": None, "max_position_embeddings": 32768,
    }  # fmt: skip
    plan = make_plan(mixtral, gpu="h200")
    expert = 3 * 4096 * 14336
    reads = [decode_step(plan, batch, 100).weights_read_bytes for batch in (1, 2, 1000)]
    # by enumeration: a second token, picking 2 of 8, adds 2 - 2 x 2/8 distinct ones on average
    assert reads[1] - reads[0] == pytest.approx(32 * 1.5 * expert * 2 + 4096 * 2)
    assert reads[2] - reads[0] == pytest.approx(32 * 6 * expert * 2 + 999 * 4096 * 2)


def test_a_mix_is_planned_for_its_longest_moment():
    plan = make_plan(LLAMA, prompt=1000, output=200, tp=4, gpu="h100")
    found = plan.to_json()["mix"]
    assert (plan.context, found["peak_kv_bytes"]) == (1200, 1200 * 327680)
    assert found["mean_kv_bytes"] == pytest.approx(1100 * 327680, rel=0.002)
    batch = found["concurrent"]
    assert batch == plan.max_concurrent()
    rate = batch / (batch * found["prefill_ms"] + found["decode_ms"]) * 1e3
    assert math.isclose(found["requests_per_s"], rate)
    assert math.isclose(found["output_tokens_per_s"], 200 * rate)


def test_rates_of_a_mix_are_withheld_where_nothing_is_known():
    no_room = make_plan(LLAMA, prompt=1000, output=200, gpu="l4").to_json()["mix"]
    assert (no_room["concurrent"], no_room["requests_per_s"]) == (0, None)
    no_rate = make_plan(LLAMA, prompt=1000, output=200, gpu="m3-ultra").to_json()["mix"]
    assert no_rate["concurrent"] > 0
    assert (no_rate["prefill_ms"], no_rate["requests_per_s"]) == (None, None)
