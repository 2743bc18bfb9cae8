"""What a request could have read whose numbers are not finite is found in no tier again, wherever its bytes are now."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from kinds import kind
from test_tiers import GREEDY, HOST, engine_of, prompt_of, run
from test_tiers_at_rest import late_engine

from kvlab.cache.prefix import PrefixOptions
from kvlab.engine import SamplingParams
from kvlab.engine.tiers import TierOptions
from kvlab.plan.policies import default_block_size
from kvlab.schedule import Request

KINDS = ("full", "latent", "windows", "delta", "states")
LONG = SamplingParams(40, ignore_eos=True)


@pytest.fixture(autouse=True)
def no_flushing(monkeypatch):
    """Nobody cuts the power here, and flushing takes longer than all the rest."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@dataclass
class Place:
    """A model, and the directory of its disk tier."""

    model: object
    path: Path

    @property
    def options(self):
        return {
            "tiers": TierOptions(HOST, self.path, 1 << 22),
            "block_size": default_block_size(self.model.model.spec, 4),
        }

    def engine(self, late=False, **options):
        return (late_engine if late else engine_of)(self.model, **{k: v for k, v in (self.options | options).items()
                                                                   if not (late and k == "block_size")})  # fmt: skip


def history(tokens):
    """A request that ended in numbers that are not finite behind `tokens`."""
    return Request("bad", [*tokens, 1], GREEDY)


def ended(engine, prompt):
    """All tokens of a request that ended while another goes on, so that nobody waits for its copies."""
    request = engine.requests[engine.add_request(prompt, GREEDY)]
    engine.add_request([5, 6, 7], LONG)
    while not request.finish_reason:
        engine.step()
    return request


def right(place, engine, prompt):
    """The tiers have nothing of the prompt; its tokens are computed and right, and what is saved then is found."""
    said, loaded = run(engine, prompt)
    assert (said, loaded) == (place.model.tokens(prompt, GREEDY), 0)
    if not engine.cache.prefix:
        assert run(engine, [*prompt, *said, 3])[1] > 0


def at_rest(place, prompt):
    engine = place.engine()
    said, _ = run(engine, prompt)
    assert len(engine.tiers.saved)
    return engine, [*prompt, *said], lambda: None


def found_by_somebody(place, prompt):
    engine, tokens, _ = at_rest(place, prompt)
    found = engine.tiers.find(history([*tokens, 2]))
    assert found.tokens
    return engine, tokens, lambda: engine.tiers.release(found)


def on_its_way_down(place, prompt):
    engine = place.engine(late=True)
    request = ended(engine, prompt)
    assert engine.tiers.in_flight and not any(entry.ready for entry in engine.tiers.saved._entries.values())
    return engine, list(request.tokens), engine.tiers.wait


def on_its_way_up(place, prompt):
    engine = place.engine(late=True)
    tokens = list(ended(engine, prompt).tokens)
    engine.tiers.wait()
    name = engine.add_request([*tokens, 2], GREEDY)
    engine.step()
    assert engine.tiers.loading(name)
    return engine, tokens, engine.tiers.wait


def on_disk(place, prompt):
    _, tokens, _ = at_rest(place, prompt)
    engine = place.engine()
    assert not len(engine.tiers.saved) and engine.tiers.saved.num_pages
    return engine, tokens, lambda: None


@pytest.mark.parametrize("name", ["full", "delta"])
@pytest.mark.parametrize("state", [at_rest, found_by_somebody, on_its_way_down, on_its_way_up, on_disk])
def test_an_expelled_page_is_never_found_whatever_was_done_with_it(tmp_path, name, state):
    place = Place(kind(name), tmp_path)
    prompt = prompt_of(place.model, 20)
    engine, tokens, settle = state(place, prompt)
    asking = history([*tokens, 2])
    saved = engine.tiers.saved
    used = sum(saved.slots.page_bytes[entry.group] for entry in saved._entries.values() if entry.pins)
    assert engine.tiers.expel(history(tokens)) > 0
    assert engine.tiers.find(asking) is None and not len(engine.tiers.saved)
    if state in (found_by_somebody, on_its_way_down, on_its_way_up):
        assert engine.tiers.slots.held_bytes == used > 0, "a place was given away while a copy used it"
    settle()
    assert engine.tiers.find(asking) is None and engine.tiers.slots.held_bytes == 0
    assert not [p for p in tmp_path.iterdir() if p.stat().st_size > 1000], "a page is left on disk"
    # who was reading it goes on, a restart finds nothing, and the same tokens computed again are found again
    while engine.scheduler.has_work:
        engine.step()
    if state is not on_its_way_up:
        right(place, place.engine(), [*tokens, 2])


@pytest.mark.parametrize("name", ["full", "delta"])
def test_only_what_shares_pages_with_it_goes(tmp_path, name):
    place = Place(kind(name), tmp_path)
    engine, size = place.engine(), place.options["block_size"]
    shared, other = prompt_of(place.model, 2 * size), prompt_of(place.model, 2 * size, 3)
    said = {i: run(engine, [*shared, i])[0] for i in (7, 8)}
    away = [*other, 7, *run(engine, [*other, 7])[0]]
    engine.tiers.expel(history([*shared, 7, *said[7]]))
    for found in (engine, place.engine()):
        longer = [*shared, 8, *said[8], 2]
        # pages behind the shared ones hang on these; the end of a sequence holds these itself
        assert found.tiers.find(history(longer)) is None
        kept = found.tiers.find(history([*away, 2]))
        assert kept.tokens > 0
        found.tiers.release(kept)


def test_a_page_that_is_saved_again_while_its_expelled_copy_lands_is_the_new_one(tmp_path):
    """Two copies under way, one name: the first is of no use to anybody, the second is found."""
    place = Place(kind("full"), tmp_path)
    engine = place.engine(late=True)
    request = ended(engine, prompt_of(place.model, 20))
    [first] = engine.tiers._flights
    engine.tiers.expel(request)
    again = engine.requests[engine.add_request(prompt_of(place.model, 20), GREEDY)]
    while not again.finish_reason:
        engine.step()
    half = engine.tiers.slots.held_bytes
    engine.tiers.copier.wait(first.ticket)
    engine.tiers.poll()
    assert engine.tiers.slots.held_bytes == half // 2 and not list(tmp_path.iterdir())
    assert engine.tiers.find(history([*again.tokens])) is None, "the second copy is under way"
    engine.tiers.wait()
    assert engine.tiers.find(history([*again.tokens])).tokens == 24


def test_a_file_that_cannot_be_deleted_is_emptied(tmp_path, monkeypatch):
    place = Place(kind("full"), tmp_path)
    engine, tokens, _ = at_rest(place, prompt_of(place.model, 20))
    monkeypatch.setattr(
        "pathlib.Path.unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError(1, "not allowed"))
    )
    assert engine.tiers.expel(history(tokens)) == 6
    assert list(engine.tiers.saved.disk.failures) == ["expel: not allowed"] * 6
    assert run(place.engine(), [*tokens, 2])[1] == 0


def test_files_of_another_process_go_too(tmp_path):
    """They were written after this process looked what there is."""
    place = Place(kind("full"), tmp_path)
    early = place.engine()
    _, tokens, _ = at_rest(place, prompt_of(place.model, 20))
    assert early.tiers.expel(history(tokens)) == 0, "it never knew of them"
    assert run(place.engine(), [*tokens, 2])[1] == 0


@pytest.mark.parametrize("through", ["the pool", "the tiers"])
@pytest.mark.parametrize("name", KINDS)
def test_a_bad_page_that_was_saved_before_anybody_noticed_is_gone_from_everywhere(tmp_path, name, through):
    """A page goes bad behind the back of the request that fills it, and is saved; the next one that reads it fails."""
    place = Place(kind(name), tmp_path)
    prefix = PrefixOptions(checkpoint_tokens=1) if through == "the pool" else None
    engine = place.engine(prefix=prefix)
    prompt, update = prompt_of(place.model, 24), engine.scheduler.update
    victim = engine.requests[engine.add_request(prompt, GREEDY)]

    def spoil(*arguments):
        if len(victim.output) == GREEDY.max_tokens - 1:
            for g, table in enumerate(engine.cache.tables[victim.request_id]):
                engine.storage.fill(255, g, [page for page in table if page][:1])
            for g, page in engine.cache.prefix.cached_pages() if prefix else ():
                engine.storage.fill(255, g, [page])
        return update(*arguments)

    engine.scheduler.update = spoil
    while not victim.finish_reason:
        engine.step()
    engine.scheduler.update = update
    longer = [*victim.tokens, 2]
    at_the_end = [e for e in engine.events.of("save") if "checkpoint" not in e.reason]
    assert victim.finish_reason == "length" and len(at_the_end) == 1
    # what begins like it and is shorter than a saved end can only read the pool
    reader = engine.requests[engine.add_request([*longer[:28], 3] if prefix else longer, GREEDY)]
    while not reader.finish_reason:
        engine.step()
    assert engine.events.counts["hit" if prefix else "load"] == 1, "it read what was left"
    assert (reader.finish_reason, reader.output) == ("error", [])
    [event] = engine.events.of("expel")
    assert event.pages > 0 and event.reason == reader.error
    # here and after a restart the same tokens are computed, and they are right
    for found in (engine, place.engine(prefix=prefix)):
        right(place, found, longer)
