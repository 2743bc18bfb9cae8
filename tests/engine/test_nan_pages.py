"""A step whose numbers are not finite leaves nothing behind: no page it wrote is found again, in the pool or below it."""

from contextlib import contextmanager

import pytest
import torch
from kinds import kind

from kvlab.cache.prefix import DESIGNS, PrefixOptions
from kvlab.engine import Engine, SamplingParams
from kvlab.engine.tiers import TierOptions
from kvlab.plan.policies import default_block_size
from kvlab.schedule import SchedulingPolicy
from kvlab.specs.pools import pool_layout
from kvlab.specs.rollback import RollbackPolicy

BAD, BEFORE, AFTER = 11, 26, 18
GREEDY = SamplingParams(3, ignore_eos=True)


@contextmanager
def poisoned(model):
    """Within: the embedding of token BAD is NaN."""
    table = next(t for name, t in model.model.decoder.weights.named.items() if name.endswith("embed_tokens.weight"))
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
    with poisoned(model):
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
