"""Preempted sequences that wait in fewer bits, all but their states: every group's pages in one small pool."""

import random

import pytest
import torch
from kinds import kind
from test_tiers import GREEDY, HOST, SWAP, engine_of, prompt_of

from kvlab.cache.prefix import PrefixOptions
from kvlab.engine import SamplingParams
from kvlab.engine.tiers import TierOptions
from kvlab.plan.policies import default_block_size
from kvlab.specs.pools import POOLS


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


LOSSLESS = {
    "full": "per_kind", "windows": "unified", "sinks": "sectors", "chunks": "per_kind", "latent": "per_kind",
    "indexed": "unified", "delta": "per_kind", "kda": "unified", "compressed": "per_kind", "parallel": "sectors",
    "shared": "per_kind",
}  # fmt: skip


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("name", LOSSLESS)
def test_a_format_that_loses_nothing_gives_every_group_its_own_pages_back(name, seed):
    """Waiting in the model's own type: each request goes on with the tokens that it gets alone, exactly."""
    model, rng = kind(name), random.Random(seed)
    size, pools = default_block_size(model.model.spec, 3), LOSSLESS[name]
    count = len(engine_of(model, block_size=size, pools=pools).num_blocks)
    engine = engine_of(
        model, scheduling=SWAP, tiers=TierOptions(1 << 20, park_dtype="fp64"), block_size=size, max_batched_tokens=7,
        num_blocks=(90,) * count, pools=pools,
    )  # fmt: skip
    prompts = [prompt_of(model, rng.randint(9, 20), i + 1) for i in range(2)]
    requests = [engine.requests[engine.add_request(prompt, GREEDY)] for prompt in prompts]
    while engine.scheduler.has_work:
        if rng.random() < 0.5:
            engine.scheduler.preempt(rng.choice(requests).request_id, 0.0)
        engine.step()
    calm = engine_of(model, block_size=size, check=False, num_blocks=None, kv_bytes=1 << 22)
    assert [r.output for r in requests] == [completion.token_ids for completion in calm.generate(prompts, GREEDY)]
    assert engine.tiers.slots.held_bytes == engine.kv.held_bytes == 0
    assert seed or engine.events.counts["compress"] > 1


def contents(engine, request_id):
    """Of each segment of each part of the model, the rows of what the request has computed and holds, in order; of a
    state all of it."""
    found, computed = {}, engine.cache.computed[request_id]
    for layer, parts in enumerate(engine.storage.views(engine.spec)):
        for part, view in enumerate(parts):
            if view is None:
                continue
            table, rule = engine.cache.tables[request_id][view.group], engine.groups[view.group].retention
            pages = [page for page in table if page]
            for segment in view.layout.segments:
                rows = (getattr(view, segment.name) if hasattr(view, "k") else view[segment.name])[pages].clone()
                if rule.rule != "state":
                    rows = rows.transpose(1, 2).flatten(0, 1)
                    entries = computed // rule.size if rule.rule == "stride" else computed
                    # behind the last entry stands what is nobody's
                    rows = rows[: len(rows) - (len(table) * view.block_size - entries)]
                found[layer, part, segment.name] = rows
    return found


def parked_once(model, park_dtype, params):
    """(contents before, contents after, output, engine) of a request that waited once, after 19 tokens."""
    size = default_block_size(model.model.spec, 3)
    count = len(engine_of(model, block_size=size).num_blocks)
    tiers = TierOptions(1 << 20, park_dtype=park_dtype)
    engine = engine_of(model, scheduling=SWAP, tiers=tiers, block_size=size, num_blocks=(60,) * count)
    name = engine.add_request(prompt_of(model, 17), params)
    engine.add_request([5] * 9, params)
    for _ in range(3):
        engine.step()
    request, before, held = engine.requests[name], contents(engine, name), engine.kv.held_bytes
    engine.scheduler.preempt(name, 0.0)
    [event] = engine.events.of("compress")
    assert event.reason == f"{engine.tiers.slots.held_bytes} bytes in {park_dtype}"
    assert 0 < engine.tiers.slots.held_bytes < held - engine.kv.held_bytes
    after = {}
    engine.events.subscribe(lambda e: e.kind == "swap_in" and after.update(contents(engine, name)))
    while engine.scheduler.has_work:
        engine.step()
    assert engine.tiers.slots.held_bytes == 0
    return before, after, request.output, engine


@pytest.mark.parametrize("park_dtype", ["int8", "int4"])
@pytest.mark.parametrize("name", ["latent", "indexed", "delta", "kda", "hybrid", "compressed"])
def test_rows_of_every_sort_wait_in_fewer_bits_and_states_as_they_are(name, park_dtype):
    """Latents, an indexer's keys, shared keys and values, entries of four tokens, and the attention of hybrids."""
    model, params = kind(name), SamplingParams(9, ignore_eos=True)
    before, after, output, engine = parked_once(model, park_dtype, params)
    assert before.keys() == after.keys()
    states = {group.retention.rule: set(group.members) for group in engine.groups}.get("state", set())
    changed = 0
    for (layer, part, segment), was in before.items():
        now = after[layer, part, segment]
        if (layer, part) in states:
            assert torch.equal(was, now), "a state was changed"
            continue
        # int8: the largest value is 127 steps; int4: smallest to largest are 15, and the zero point's bits move the step
        span = was.abs().amax(-1) / 127 if park_dtype == "int8" else (was.amax(-1) - was.amin(-1)) / 15
        assert ((was - now).abs() <= 0.51 * span[..., None] + 1e-4 * was.abs().amax()).all()
        changed += not torch.equal(was, now)
    assert changed == sum((layer, part) not in states for layer, part, _ in before)
    # what a lossy past leads to is a function of the schedule alone
    assert parked_once(model, park_dtype, params)[2] == output


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("name", ["full", "windows", "latent", "delta", "compressed", "hybrid"])
def test_the_waiting_pool_takes_the_bytes_that_its_layout_says_and_no_more_than_given(name, pools):
    model, given = kind(name), 300_000
    size = default_block_size(model.model.spec, 4)
    engine = engine_of(model, tiers=TierOptions(given, park_dtype="int4"), block_size=size, pools=pools, num_blocks=None,
                       kv_bytes=1 << 22)  # fmt: skip
    slots, storage = engine.tiers.slots, engine.tiers.copier.storage
    layout = storage.layout
    assert layout.pool_bytes(storage.num_blocks) == storage.allocated_bytes == slots.capacity_bytes <= given
    assert given - storage.allocated_bytes < slots.unit_bytes
    for g, (own, group) in enumerate(zip(engine.groups, layout.groups, strict=True)):
        # a table counts the same tokens in both pools
        assert (own.members, own.block_size) == (group.members, group.block_size)
        # what the last page of a sector ends before is less than half of it
        assert group.block_bytes <= layout.page_bytes(g) < 2 * group.block_bytes
        assert layout.page_bytes(g) * layout.pages_per_unit[g] == slots.unit_bytes


def test_what_cannot_be_compressed_is_said():
    def refused(name, dtype, why, size=4, **options):
        with pytest.raises(ValueError, match=why):
            size = default_block_size(kind(name).model.spec, size)
            engine_of(kind(name), tiers=TierOptions(8 * HOST, park_dtype=dtype), block_size=size, **options)

    refused("states", "int8", "park_dtype 'int8': the model keeps states alone")
    refused("full", "kivi2", "park_dtype 'kivi2': codes several tokens together", 32)
    refused("full", "int8", "kv_dtype 'kivi2': codes several tokens together", 32, kv_dtype="kivi2")
    refused("latent", "kivi2", "park_dtype 'kivi2': layer 0 keeps mla entries")
    refused("delta", "int9", "park_dtype 'int9': must be one of")
    with pytest.raises(ValueError, match="host_bytes 100: must hold a unit"):
        engine_of(kind("full"), tiers=TierOptions(100, park_dtype="int8"))
    with pytest.raises(ValueError, match="park_dtype 'int8': lossy pages are not saved"):
        TierOptions(1, "x", 1, park_dtype="int8")
