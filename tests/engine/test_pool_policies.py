"""The same tokens and the predicted bytes from every way to share memory."""

import random

import pytest
import torch

from kvlab.engine import Engine, SamplingParams
from kvlab.plan.policies import PolicySettings, sequence_bytes
from kvlab.specs.pools import POOLS


def storages(engine):
    """Bytes of the distinct storages that the pool's tensors live in, as torch has them."""
    found = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in engine.storage.buffers.values()}
    return sum(found.values())


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_the_same_tokens_whatever_the_pools(tiny, pools, block_size):
    both, params = tiny("both"), SamplingParams(12)
    prompts = [[5, 3, 8, 1, 40], [7], list(range(20, 39))]
    engine = Engine(both.model(), pools=pools, num_blocks=120, block_size=block_size, check=True)
    done = engine.generate(prompts, params)
    assert [c.token_ids for c in done] == [both.reference.tokens(p, params) for p in prompts]
    assert engine.kv.held_bytes == 0
    assert engine.pool_use.held == 0


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("seed", range(2))
def test_a_small_pool_preempts_and_everyone_still_finishes(tiny, pools, seed):
    """Sectors scatter: the oldest request may have to lose its own pages, and then run alone."""
    rng = random.Random(seed)
    both, params = tiny("both"), SamplingParams(16)
    prompts = [[rng.randrange(61) for _ in range(rng.randint(1, 5))] for _ in range(5)]
    options = {"pools": pools, "block_size": 2, "max_batched_tokens": 6, "check": True}
    layout = Engine(both.model(), num_blocks=99, **options).layout
    longest = layout.units(layout.sequence_pages(5 + 15, 6))
    engine = Engine(both.model(), num_blocks=tuple(1 + n for n in longest), **options)
    done = engine.generate(prompts, params)
    assert [c.error for c in done] == [""] * 5
    assert [c.token_ids for c in done] == [both.reference.tokens(p, params) for p in prompts]
    assert engine.events.counts["preempt"] > 0


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("kv_dtype", ["fp32", "fp8_e4m3", "int8"])
def test_predicted_is_allocated(tiny, pools, kv_dtype):
    engine = Engine(tiny("both").model("fp32"), pools=pools, kv_dtype=kv_dtype, num_blocks=9, block_size=3)
    assert storages(engine) == engine.kv.predicted_bytes == engine.kv.allocated_bytes == engine.pool_use.storage
    one = sequence_bytes(engine.spec, 20, PolicySettings("paged", 3, 4, pools=pools))
    # the plan's price of a page is the allocator's
    assert [g.block_bytes for g in one.groups] == [engine.layout.page_bytes(g) for g in range(len(engine.groups))]
    assert one.pool_overhead == sum(engine.layout.unit_bytes)


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("prompt_tokens", [1, 4, 7])
def test_bytes_written_after_n_tokens_are_the_bytes_of_n(tiny, pools, prompt_tokens, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "reference")
    changed = {}
    for sentinel in (0xA5, 0x5A):
        engine = Engine(tiny("both").model("fp32"), pools=pools, num_blocks=20, block_size=3)
        engine.storage.fill(sentinel)
        engine.add_request(list(range(prompt_tokens)), SamplingParams(2))
        engine.step()
        for name, bytes_ in distinct(engine).items():
            changed[name] = changed.get(name, False) | (bytes_ != sentinel)
    # up to the window of 7 nothing is dropped
    assert sum(int(mask.sum()) for mask in changed.values()) == engine.spec.bytes_at(prompt_tokens)


def distinct(engine):
    """Each storage once, as flat bytes, in the order in which the members first use it."""
    found = {}
    for buffer in engine.storage.buffers.values():
        storage = buffer.untyped_storage()
        found.setdefault(storage.data_ptr(), torch.empty(0, dtype=torch.uint8).set_(storage))
    return dict(enumerate(found.values()))


@pytest.mark.parametrize("kv_dtype", [None, "int8", "int4"])
@pytest.mark.parametrize("pools", POOLS)
def test_peak_resident_bytes_are_the_predicted_ones(tiny, pools, kv_dtype):
    """One request in chunks of 4: the plan's bytes of a sequence, reached and not passed.

    Pitfall: llama.cpp#23978, in which windows over a quantized cache grew to its size in full precision.
    """
    engine = Engine(
        tiny("both").model(), kv_dtype=kv_dtype, pools=pools, num_blocks=80, block_size=3, max_batched_tokens=4
    )
    engine.generate([[(7 * i + 3) % 61 for i in range(48)]], SamplingParams(1))
    predicted = sequence_bytes(engine.spec, 48, PolicySettings("paged", 3, 4, pools=pools))
    assert engine.kv.peak_held_bytes == predicted.total


@pytest.mark.parametrize("pools", POOLS)
def test_a_budget_in_bytes_is_kept(tiny, pools):
    engine = Engine(tiny("both").model("fp32"), pools=pools, kv_bytes=150_000, block_size=4, max_batched_tokens=16)
    assert 150_000 - max(engine.layout.unit_bytes) * 2 < engine.kv.allocated_bytes <= 150_000
    assert "pages" in engine.describe() or "sectors" in engine.describe()


def test_short_sequences_may_set_the_split(tiny):
    """A window is as full of a short sequence as of a long one, full attention is not."""
    model = tiny("both").model("fp32")
    options = {"kv_bytes": 200_000, "block_size": 4, "max_batched_tokens": 16}
    long, short = Engine(model, **options), Engine(model, split_tokens=24, **options)
    assert short.num_blocks[1] > long.num_blocks[1] and short.num_blocks[0] < long.num_blocks[0]
    # 24 tokens are 6 pages of either, 128 are 32 and 7
    assert short.num_blocks[0] == short.num_blocks[1]
    assert abs(long.num_blocks[0] / long.num_blocks[1] - 32 / 7) < 0.1


def test_pools_of_another_name_are_refused(tiny):
    with pytest.raises(ValueError, match="pools 'shared': must be one of per_kind, unified, sectors"):
        Engine(tiny("both").model(), pools="shared", num_blocks=9)
