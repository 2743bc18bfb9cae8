"""Saved prefixes reach their place when nobody is left to step for them, and what is forgotten of them is what is gone."""

import shutil

import pytest
from kinds import kind
from late_copies import LateCopier
from test_tiers import GREEDY, HOST, engine_of, prompt_of, run

from kvlab.engine import SamplingParams
from kvlab.engine.tiers import TierOptions
from kvlab.plan.policies import default_block_size


def late_engine(model, **options):
    engine = engine_of(model, block_size=default_block_size(model.model.spec, 4), **options)
    engine.tiers.copier = LateCopier(engine.tiers.copier)
    return engine


@pytest.mark.parametrize("last", ["ends", "is aborted"])
@pytest.mark.parametrize("name", ["full", "delta"])
def test_an_engine_at_rest_has_saved_everything(tmp_path, name, last):
    model = kind(name)
    tiers = TierOptions(HOST, tmp_path, 1 << 22)
    engine = late_engine(model, tiers=tiers)
    prompt = prompt_of(model, 20)
    first = engine.requests[engine.add_request(prompt, GREEDY)]
    other = engine.add_request(prompt_of(model, 9, 2), SamplingParams(6 if last == "ends" else 30, ignore_eos=True))
    while not first.finish_reason:
        engine.step()
    if last == "is aborted":
        assert engine.tiers.in_flight and engine.abort(other)
    while engine.scheduler.has_work:
        engine.step()
    assert not engine.tiers.in_flight and engine.kv.held_bytes == 0
    longer = prompt + first.output + [3]
    assert run(engine_of(model, tiers=tiers, block_size=engine.options.block_size), longer)[1] > 0


def test_ends_of_sequences_are_forgotten_with_their_pages():
    """Host memory for two of them: however many end, only those whose pages are there are remembered."""
    model = kind("states")
    engine = engine_of(model, block_size=default_block_size(model.model.spec, 4))
    room = 2 * engine.layout.page_bytes(0)
    engine = engine_of(model, block_size=engine.options.block_size, tiers=TierOptions(room))
    for i in range(60):
        run(engine, [1 + i, 2, 3], SamplingParams(1, ignore_eos=True))
    finder = engine.tiers.finder
    assert len(finder.saved) == 2 and len(finder._ends) <= 16 + 2 * 2
    assert run(engine, [60, 2, 3, 4], SamplingParams(1, ignore_eos=True))[1] == 3


def test_an_end_whose_pages_are_busy_is_found_later_and_one_that_is_lost_is_not(tmp_path):
    model = kind("delta")
    tiers = TierOptions(HOST, tmp_path, 1 << 22)
    engine = late_engine(model, tiers=tiers)
    request = engine.requests[engine.add_request(prompt_of(model, 20), GREEDY)]
    other = engine.add_request(prompt_of(model, 9, 2), SamplingParams(40, ignore_eos=True))
    while not request.finish_reason:
        engine.step()
    below, again = engine.tiers, engine.requests[other]
    again.tokens[:] = request.tokens  # the look-up asks for tokens alone
    again.tokens.append(3)
    assert engine.tiers.in_flight and below.find(again) is None, "its copy is under way"
    engine.tiers.drain()
    found = below.find(again)
    assert found.tokens == request.num_computed and not below.lookups.lost
    engine.tiers.release(found)
    # no place in host memory is no loss either
    second = engine_of(model, tiers=tiers, block_size=engine.options.block_size)
    take = second.tiers.saved.take_slot
    second.tiers.saved.take_slot = lambda group: None
    assert second.tiers.find(again) is None and not second.tiers.lookups.lost
    second.tiers.saved.take_slot = take
    second.tiers.release(second.tiers.find(again))
    # but a page that is gone is, and its note goes too
    third = engine_of(model, tiers=tiers, block_size=engine.options.block_size)
    assert third.tiers.finder._ends
    shutil.rmtree(tmp_path)
    assert third.tiers.find(again) is None and third.tiers.lookups.lost
    # but for the checkpoint of the other prompt, which nobody asked for
    assert len(third.tiers.finder._ends) == len(third.tiers.saved.disk.notes()) == 1
