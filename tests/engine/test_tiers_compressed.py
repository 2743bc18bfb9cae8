"""Preempted sequences that wait in fewer bits: full layers, windows and chunks, each group's pages in one small pool."""

import random

import pytest
import torch
from kinds import kind
from test_tiers import GREEDY, HOST, SWAP, engine_of, prompt_of

from kvlab.cache.prefix import PrefixOptions
from kvlab.engine import SamplingParams
from kvlab.engine.tiers import TierOptions
from kvlab.plan.policies import default_block_size


@pytest.mark.parametrize("layers", ["full", "both"])
def test_a_compressed_sequence_waits_in_fewer_bits_and_comes_back_as_the_format_kept_it(tiny, layers):
    model = tiny(layers).model(torch.float32)
    engine = engine_of(model, scheduling=SWAP, tiers=TierOptions(1 << 16, park_dtype="int8"), prefix=PrefixOptions())
    prompt = [(3 * i) % 50 for i in range(17)]
    name = engine.add_request(prompt, SamplingParams(9, ignore_eos=True))
    engine.add_request([5] * 9, SamplingParams(20, ignore_eos=True))
    for _ in range(3):
        engine.step()
    views = [view for layer in engine.storage.views(engine.spec) for view in layer]

    def rows():
        """Of each layer the keys and values of the pages that the request holds, by position."""
        return [
            getattr(view, n)[[p for p in engine.cache.tables[name][view.group] if p]].transpose(1, 2).flatten(0, 1)
            for view in views for n in ("k", "v")
        ]  # fmt: skip

    before, held = rows(), [sum(p > 0 for p in table) for table in engine.cache.tables[name]]
    # 19 tokens in pages of 4; a window of 7 still reads the last two of them
    assert held == [5 if group.retention.rule == "all" else 2 for group in engine.groups]
    pool = engine.kv.held_bytes
    engine.scheduler.preempt(name, 0.0)
    [event] = engine.events.of("compress")
    small, large = ([n * size(g) for g, n in enumerate(held)]
                    for size in (engine.tiers.slots.page_bytes.__getitem__, engine.layout.page_bytes))  # fmt: skip
    assert (event.tokens, event.pages, event.reason) == (19, sum(held), f"{sum(small)} bytes in int8")
    assert (engine.tiers.slots.held_bytes, pool - engine.kv.held_bytes) == (sum(small), sum(large))
    assert all(few < many for few, many in zip(small, large, strict=True))
    seen = []
    engine.events.subscribe(lambda e: e.kind == "swap_in" and seen.extend(rows()))
    engine.step()
    assert len(seen) == len(before) and engine.tiers.slots.held_bytes == 0
    for was, now in zip(before, seen, strict=True):
        # the last row of the last page holds no token; a row's largest value spans 127 steps, and rounding is off by
        # half a step
        was, now = was[:-1], now[:-1]
        step = was.abs().amax(-1, keepdim=True) / 127
        assert ((was - now).abs() <= 0.51 * step).all() and not torch.equal(was, now)
    while engine.scheduler.has_work:
        engine.step()
    # what it computed on lossy pages is nobody's prefix
    again = engine.requests[engine.add_request(prompt, SamplingParams(9, ignore_eos=True))]
    while not again.finish_reason:
        engine.step()
    assert again.output == engine_of(model).generate([prompt], SamplingParams(9, ignore_eos=True))[0].token_ids


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("name", ["full", "windows", "sinks", "chunks"])
def test_a_format_that_loses_nothing_gives_every_group_its_own_pages_back(name, seed):
    """Waiting in the model's own type: each request goes on with the tokens that it gets alone, exactly."""
    model, rng = kind(name), random.Random(seed)
    size = default_block_size(model.model.spec, 3)
    engine = engine_of(
        model, scheduling=SWAP, tiers=TierOptions(1 << 18, park_dtype="fp64"), block_size=size, max_batched_tokens=7,
        num_blocks=tuple([60] * len(engine_of(model, block_size=size).num_blocks)),
    )  # fmt: skip
    prompts = [prompt_of(model, rng.randint(9, 30), i + 1) for i in range(3)]
    requests = [engine.requests[engine.add_request(prompt, GREEDY)] for prompt in prompts]
    while engine.scheduler.has_work:
        if rng.random() < 0.5:
            engine.scheduler.preempt(rng.choice(requests).request_id, 0.0)
        engine.step()
    assert [r.output for r in requests] == [model.tokens(prompt, GREEDY) for prompt in prompts]
    assert engine.tiers.slots.held_bytes == engine.kv.held_bytes == 0
    assert seed or engine.events.counts["compress"] > 2


def test_what_cannot_be_compressed_is_said():
    for name, dtype in (("delta", "int8"), ("latent", "int8"), ("states", "int8"), ("full", "kivi2")):
        with pytest.raises(ValueError, match=f"park_dtype '{dtype}': needs keys and values coded row by row"):
            size = 32 if dtype == "kivi2" else default_block_size(kind(name).model.spec, 4)
            engine_of(kind(name), tiers=TierOptions(8 * HOST, park_dtype=dtype), block_size=size)
    with pytest.raises(ValueError, match="park_dtype 'int8': lossy pages are not saved"):
        TierOptions(1, "x", 1, park_dtype="int8")
