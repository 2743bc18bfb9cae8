"""A step whose numbers are not finite leaves nothing behind: no page it wrote is found again, in the pool or below it."""

from contextlib import contextmanager

import pytest
import torch
from kinds import kind

from kvlab.cache.prefix import DESIGNS, PrefixOptions
from kvlab.engine import Engine, SamplingParams
from kvlab.engine.finite import spoiled_requests
from kvlab.engine.tiers import TierOptions
from kvlab.lab.failures import unwatched
from kvlab.plan.policies import default_block_size
from kvlab.schedule import Chunk, Request, SchedulingPolicy, Step
from kvlab.specs.pools import pool_layout
from kvlab.specs.rollback import RollbackPolicy

BAD, BEFORE, AFTER = 11, 26, 18
GREEDY = SamplingParams(3, ignore_eos=True)


@contextmanager
def poisoned(model):
    """Within: the embedding of token BAD is NaN."""
    table = next(t for name, t in model.decoder.weights.named.items() if name.endswith("embed_tokens.weight"))
    row = table[BAD].clone()
    table[BAD] = float("nan")
    try:
        yield
    finally:
        table[BAD] = row


def engine_of(model, design):
    size = default_block_size(model.model.spec, 3)
    layout = pool_layout(model.model.spec, size)
    pages = layout.sequence_pages(BEFORE + AFTER + 4, 12, RollbackPolicy())
    return Engine(
        model.model, block_size=size, max_batched_tokens=12, num_blocks=tuple(2 + 6 * n for n in layout.units(pages)),
        prefix=PrefixOptions(design, checkpoint_tokens=1), tiers=TierOptions(1 << 22),
        scheduling=SchedulingPolicy(preempt="swap"),
    )  # fmt: skip


def findable(engine):
    """The bytes of every page that a later request could begin with: in the prefix cache, and saved below the pool."""
    prefix = engine.cache.prefix
    for item, _, column in prefix.index.entries():
        group, page = prefix.columns[column].group, item - prefix.columns[column].base
        yield torch.cat([rows[page] for rows in engine.storage.rows(group)])
    for entry in engine.tiers.saved._entries.values():
        yield torch.frombuffer(bytearray(engine.tiers.saved.memory(entry.group, entry.slot)), dtype=torch.uint8)


def assert_finite(engine):
    for data in findable(engine):
        # half of a NaN in fp32 is a number above 1e300 too
        assert (data[: len(data) // 8 * 8].view(torch.float64).abs() < 1e300).all(), "a page with NaN can be found"


def drain(engine):
    while engine.scheduler.has_work:
        engine.step()
        assert_finite(engine)


@pytest.mark.parametrize(
    ("name", "design"),
    [(name, DESIGNS[i % 2]) for i, name in enumerate(("full", "windows", "chunks", "delta", "states", "compressed"))]
    + [("delta", DESIGNS[0])],
)
def test_no_page_of_such_a_step_is_found_again(name, design):
    model = kind(name)
    good = [(5 * i + 13) % model.vocab for i in range(BEFORE + AFTER)]
    assert BAD not in good
    bad = [*good[:BEFORE], BAD, *good[BEFORE:]]
    with poisoned(model.model):
        engine = engine_of(model, design)
        engine.storage.fill(0)
        # it ends by itself, is aborted while its prompt is computed, is moved down on the way
        for end in (lambda r: None, engine.abort, lambda r: engine.scheduler.preempt(r, 0.0)):
            request = engine.requests[engine.add_request(bad, GREEDY)]
            beside = engine.requests[engine.add_request(good[: BEFORE - 5] + [3] * 4, GREEDY)]
            while request.num_computed <= BEFORE and not request.finish_reason:
                engine.step()
                assert_finite(engine)
            end(request.request_id)
            drain(engine)
            assert request.finish_reason in ("error", "abort") and beside.finish_reason == "length"
        engine.cache.check_invariants()
        again = engine.requests[engine.add_request(good, GREEDY)]
        drain(engine)
    assert again.output == model.tokens(good, GREEDY)


@contextmanager
def spoiling(engine):
    """Within: the row of token BAD ends in NaN, and so does what its slots keep. As after a kernel whose tiles leave
    out what lies behind a window: no other row has heard of it."""
    decoder = engine.runner.decoder
    whole = decoder.hidden_states

    def hidden_states(ids, batches, views, *others):
        hidden = whole(ids, batches, views, *others)
        for row in (ids == BAD).nonzero().flatten().tolist():
            hidden[row] = float("nan")
            page, offset = divmod(int(batches[0].slot_mapping[row]), views[0][0].block_size)
            for layer in views:
                layer[0].k[page, :, offset] = float("nan")
        return hidden

    decoder.hidden_states = hidden_states
    try:
        yield
    finally:
        del decoder.hidden_states


@pytest.mark.parametrize("budget", [64, 36], ids=["its last row is sampled from", "no row is"])
def test_a_bad_row_in_the_middle_of_a_chunk_ends_the_request(tiny, budget):
    """All layers have windows of 7, so the request would go on, and leave the bad page to others."""
    model, tokens = tiny("window").model(), tiny("window").reference.tokens
    good, params = [12 + (5 * i) % 49 for i in range(20)], SamplingParams(6, ignore_eos=True)
    bad = [*good[:4], BAD, *(12 + (7 * i) % 49 for i in range(30))]

    def asked(engine):
        # pages that nobody held have finite numbers
        engine.storage.fill(0)
        with spoiling(engine):
            requests = [engine.requests[engine.add_request(prompt, params)] for prompt in (good, bad)]
            while engine.scheduler.has_work:
                engine.step()
        return [(r.finish_reason, r.output) for r in requests]

    options = {"block_size": 4, "num_blocks": 60, "max_batched_tokens": budget, "prefix": PrefixOptions()}
    blind, engine = (Engine(model, tiers=TierOptions(1 << 20), **options) for _ in range(2))
    with unwatched(blind):
        assert asked(blind) == [("length", tokens(good, params)), ("length", tokens(bad, params))]
    with pytest.raises(AssertionError, match="a page with NaN can be found"):
        assert_finite(blind)
    assert asked(engine) == [("length", tokens(good, params)), ("error", [])]
    assert_finite(engine)
    assert engine.generate([bad[:10]], params)[0].token_ids == tokens(bad[:10], params)


def test_every_row_counts_from_which_nobody_samples():
    def chunk(name, count, samples, drafts=()):
        return Chunk(Request(name, [1] * 9, GREEDY), 0, count, samples, drafts=drafts)

    chunks = chunk("a", 1, True), chunk("b", 4, False), chunk("c", 5, True, (7, 8)), chunk("d", 1, False)
    # row by row, and one of padding behind them
    owners = [None, *"bbbb", "c", "c", None, None, None, "d", None]
    for row, owner in enumerate(owners):
        finite = torch.ones(len(owners), dtype=torch.bool)
        finite[row] = False
        assert spoiled_requests(Step(1, chunks), finite.numpy()) == {owner} - {None}
