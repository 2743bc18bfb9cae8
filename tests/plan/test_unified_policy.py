"""The vllm policy against numbers worked by hand: one page size, groups, grown blocks, padding."""

import pytest

from kvlab.plan.policies import PolicySettings, sequence_bytes
from kvlab.plan.unified import unified_pool
from kvlab.specs.formats import get_format
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import (
    Attention,
    ChunkedLocal,
    CompressedEntries,
    IndexKeys,
    MLALatent,
    RecurrentState,
    SlidingWindow,
    StateArray,
)

BF16, FP32 = get_format("bf16"), get_format("fp32")


def model_of(*layers):
    return ModelSpec("m", "m", tuple(LayerSpec(i, p) for i, p in enumerate(layers)), 2880, 64, 1000)


def full(heads=8, dim=64):
    return (Attention(heads, dim, dim, BF16),)


def sliding(size=128, heads=8, dim=64):
    return (SlidingWindow(heads, dim, dim, BF16, window=size),)


def state(elements, fmt=FP32):
    return (RecurrentState("gated_delta", (StateArray("state", ((elements, 1),), 1, fmt),)),)


def vllm(model, tokens, in_flight=2048):
    return sequence_bytes(model, tokens, PolicySettings("vllm", block_size=16, in_flight=in_flight))


def test_gpt_oss_twelve_windows_and_twelve_full_layers():
    # 2 groups of 12 layers; page 16 x 8 heads x 64 x 2 x 2 B = 32,768 B per layer
    model = model_of(*[p for _ in range(12) for p in (sliding(), full())])
    pool = unified_pool(model, 16)
    assert (pool.page_bytes, pool.layers_per_group, pool.block_bytes, len(pool.groups)) == (32768, 12, 393216, 2)
    sequence = vllm(model, 131072)
    # window: ceil((127 + 2048) / 16) + 1 = 137 blocks; full: 8,192
    assert [g.pages for g in sequence.groups] == [137, 8192]
    assert sequence.total == (137 + 8192) * 393216
    window = sequence.groups[0]
    assert window.useful == 12 * 128 * 2048
    assert window.reserve == (137 - 9) * 393216  # ceil(128 / 16) + 1 blocks without tokens in flight
    assert sequence.pool_overhead == 393216


def test_gemma_3_five_windows_to_a_full_layer_make_six_groups():
    # 40 sliding and 8 full layers of 8 heads x 256: groups of 8 layers
    model = model_of(*[sliding(1024, 8, 256)] * 40, *[full(8, 256)] * 8)
    pool = unified_pool(model, 16)
    assert [(g.name, len(g.parts)) for g in pool.groups] == [
        ("sliding1024", 8), ("sliding1024#2", 8), ("sliding1024#3", 8), ("sliding1024#4", 8), ("sliding1024#5", 8),
        ("full", 8),
    ]  # fmt: skip
    # 5 x (ceil(3071 / 16) + 1 = 193) + ceil(5000 / 16) = 313
    assert vllm(model, 5000).total == (5 * 193 + 313) * 8 * 16 * 8192


def test_nearly_equal_types_share_the_larger_group_size_and_pad():
    # 13 full + 12 sliding: 13 < 1.5 x 12, so 13 layers a group and one empty place in the window's
    model = model_of(*[full()] * 13, *[sliding()] * 12)
    pool = unified_pool(model, 16)
    assert (pool.layers_per_group, [len(g.parts) for g in pool.groups]) == (13, [13, 12])
    window = vllm(model, 4096).groups[1]
    assert window.padding == 9 * 32768  # one layer's page in each of the 9 blocks that hold data
    # 18 to 12 is 1.5 times: groups of 12, the second full group half empty
    assert [len(g.parts) for g in unified_pool(model_of(*[full()] * 18, *[sliding()] * 12), 16).groups] == [12, 6, 12]


@pytest.mark.parametrize(("fmt", "block"), [(BF16, 544), (FP32, 1056)])
def test_attention_blocks_grow_until_a_page_covers_the_state(fmt, block):
    # Qwen3-Next: 12 full layers of 2 heads x 256 (2,048 B a token), 36 states of 524,288 values and 24,576 bf16 inputs
    arrays = (StateArray("conv", ((8192, 1),), 3, BF16), StateArray("state", ((524288, 1),), 1, fmt))
    model = model_of(*[(RecurrentState("gated_delta", arrays),)] * 36, *[full(2, 256)] * 12)
    pool = unified_pool(model, 16)
    assert pool.page_bytes == block * 2048
    assert [g.block_size for g in pool.groups] == [0, 0, 0, block]
    sequence = vllm(model, 32768)
    assert [g.pages for g in sequence.groups] == [1, 1, 1, -(-32768 // block)]
    one_state = 24576 * 2 + 524288 * (4 if fmt is FP32 else 2)
    assert sum(g.padding for g in sequence.groups) == 36 * (block * 2048 - one_state)


def test_narrow_layers_put_more_tokens_into_a_block():
    # windows of 16 heads x 256 (16,384 B a token), full of 4 x 512 (8,192 B): 16 and 32 tokens of 262,144 B
    pool = unified_pool(model_of(*[sliding(1024, 16, 256)] * 5, full(4, 512)), 16)
    assert pool.page_bytes == 262144
    assert {g.name.partition("#")[0]: g.block_size for g in pool.groups} == {"sliding1024": 16, "full": 32}


def test_latents_and_index_keys_share_one_group():
    model = model_of(*[(MLALatent(512, 64, BF16), IndexKeys(128, BF16))] * 3)
    pool = unified_pool(model, 16)
    assert (len(pool.groups), pool.block_bytes) == (1, 3 * 16 * (1152 + 256))
    assert vllm(model, 17).total == 2 * pool.block_bytes


def test_only_states_take_one_block_of_exactly_their_size():
    model = model_of(*[state(1000)] * 4)
    assert (vllm(model, 1).total, vllm(model, 10**6).total) == (16000, 16000)


def test_chunks_take_no_extra_block():
    model = model_of((ChunkedLocal(8, 64, 64, BF16, chunk=8192),), full())
    assert [g.pages for g in vllm(model, 131072).groups] == [(8192 + 2048) // 16, 8192]


def test_compressed_entries_are_refused_by_name():
    with pytest.raises(ValueError, match="policy 'vllm': compressed entries"):
        vllm(model_of((CompressedEntries(4, 512, BF16),)), 100)


def test_layers_without_a_cache_take_nothing():
    assert vllm(model_of((), ()), 100).total == 0
