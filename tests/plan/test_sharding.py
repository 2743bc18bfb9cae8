"""What one GPU holds: heads split or copied, layers in stages, tokens dealt out."""

import pytest

from kvlab.plan.plan import make_plan
from kvlab.plan.policies import PolicySettings, ideal_bytes, sequence_bytes
from kvlab.plan.sharding import Sharding, stage_models, stage_ranges
from kvlab.specs.formats import get_format
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import (
    Attention,
    CompressedEntries,
    MLALatent,
    RecurrentState,
    Shared,
    SlidingWindow,
    StateArray,
)

BF16, FP32 = get_format("bf16"), get_format("fp32")


def model_of(*parts, query_heads=16):
    return ModelSpec("m", "m", tuple(LayerSpec(i, (p,)) for i, p in enumerate(parts)), 2048, query_heads, 1000)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_every_rank_has_a_head_and_bytes_stop_shrinking_at_the_kv_heads(kv_heads, tp):
    # transformers#48307, vllm#1640: more ranks than KV heads gave ranks without heads
    (rank,) = stage_models(model_of(Attention(kv_heads, 128, 128, BF16)), Sharding(tp=tp))
    held = -(-kv_heads // tp)
    assert ideal_bytes(rank, 10) == 10 * 2 * held * 128 * 2


@pytest.mark.parametrize("tp", [1, 2, 8, 128])
def test_latents_are_copied_to_every_rank_and_never_refused(tp):
    # tt-xla#5849: a divisibility rule for heads was applied to latents
    model = model_of(MLALatent(512, 64, BF16), query_heads=128)
    assert ideal_bytes(stage_models(model, Sharding(tp=tp))[0], 7) == 7 * 1152


def test_heads_that_do_not_divide_are_refused_by_name():
    with pytest.raises(ValueError, match="tp 3: must divide the 16 query heads"):
        stage_models(model_of(Attention(8, 128, 128, BF16)), Sharding(tp=3))
    with pytest.raises(ValueError, match="tp 4: must divide, or be a multiple of, the 6 KV heads"):
        stage_models(model_of(Attention(6, 128, 128, BF16), query_heads=12), Sharding(tp=4))
    with pytest.raises(ValueError, match="pp 3: must be at most the 2 layers"):
        stage_models(model_of(*[Attention(8, 128, 128, BF16)] * 2), Sharding(pp=3))
    with pytest.raises(ValueError, match="cp 0: must be a positive whole number"):
        Sharding(cp=0)


def test_states_split_by_units_and_copy_what_is_fewer_than_the_ranks():
    state = RecurrentState(
        "mamba2", (StateArray("conv", ((64, 1), (2, 16)), 3, BF16), StateArray("ssm", ((32, 64),), 16, FP32))
    )
    (rank,) = stage_models(model_of(state), Sharding(tp=4))
    # channels 64 / 4, groups max(1, 2 / 4), heads 32 / 4
    assert rank.state_bytes == (16 + 16) * 3 * 2 + 8 * 64 * 16 * 4


def test_layers_left_over_go_to_stages_before_the_last():
    assert [len(r) for r in stage_ranges(61, 4)] == [15, 15, 16, 15]
    assert [len(r) for r in stage_ranges(7, 5)] == [1, 1, 2, 2, 1]
    assert [list(r) for r in stage_ranges(5, 2)] == [[0, 1, 2], [3, 4]]


def test_the_fullest_stage_decides_how_many_fit():
    # 4 full layers, then 4 windows: the first stage fills up first
    wide, narrow = Attention(8, 128, 128, BF16), SlidingWindow(8, 128, 128, BF16, window=128)
    model = model_of(*[wide] * 4, *[narrow] * 4)
    plan = make_plan(model, context=4096, pp=2, gpu="l4", reserve=0)
    assert plan.per_gpu().total == 4 * 4096 * 4096
    assert plan.max_concurrent() == plan.memory.free_bytes // (4 * 4096 * 4096)
    assert plan.sequence().total == 4 * (4096 + 128) * 4096


def test_a_layer_cannot_share_a_cache_on_another_stage():
    model = model_of(Attention(8, 128, 128, BF16), Shared(0), Shared(0), Shared(0))
    with pytest.raises(ValueError, match="pp 2: layer 2 reads the cache of layer 0"):
        stage_models(model, Sharding(pp=2))


def test_context_parallel_ranks_split_tokens_but_not_windows_or_states():
    state = RecurrentState("x", (StateArray("s", ((8, 4),), 1, FP32),))
    parts = (Attention(8, 128, 128, BF16), SlidingWindow(8, 128, 128, BF16, window=64), state)
    model = model_of(*parts, CompressedEntries(4, 512, BF16))
    # 1,001 tokens over 4 ranks: the fullest has 251; 250 entries: 63; window and state whole
    assert ideal_bytes(model, 1001, cp=4) == 251 * 4096 + 64 * 4096 + 128 + 63 * 1024
    paged = sequence_bytes(model, 1001, PolicySettings("paged", block_size=16, in_flight=1, cp=4))
    assert {g.name: g.pages for g in paged.groups} == {"full": 16, "sliding64": 5, "compressed4": 16, "state": 1}


def test_the_three_degrees_multiply():
    model = model_of(*[Attention(8, 128, 128, BF16)] * 4)
    plan = make_plan(model, context=1000, tp=2, pp=2, cp=2)
    assert plan.options.sharding.num_gpus == 8
    assert plan.per_gpu().total * 8 == plan.sequence().total
