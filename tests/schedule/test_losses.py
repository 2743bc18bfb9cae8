"""Whatever a cache or a tier gives up is an event with its reason, and costs nothing where nobody asks."""

import json

import pytest

from kvlab.cache import KVCacheManager, PrefixOptions
from kvlab.cache.prefix.options import EVICTIONS
from kvlab.schedule import EventLog, Request, SamplingParams, Scheduler
from kvlab.schedule.events import KINDS, Event
from kvlab.schedule.scheduler import Limits
from kvlab.schedule.snapshots import recording, sentence
from kvlab.schedule.story import STORIES, run, story_params, story_requests, story_scheduler
from kvlab.specs.formats import get_format
from kvlab.specs.layout import group_parts
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import Attention, RecurrentState, SlidingWindow, StateArray

BF16 = get_format("bf16")
PARTS = {
    "full": (Attention(1, 16, 16, BF16),),
    "both": (Attention(1, 16, 16, BF16), SlidingWindow(1, 16, 16, BF16, window=8)),
    "states": (Attention(1, 16, 16, BF16), RecurrentState("mamba2", (StateArray("ssm", ((4, 8),), 8, BF16),))),
}


def scheduler_of(kind="full", pages=9, log=None, **options):
    layers = tuple(LayerSpec(i, (part,)) for i, part in enumerate(PARTS[kind]))
    groups = group_parts(ModelSpec("m", "m", layers, 32, 4, 64), 4)
    cache = KVCacheManager(groups, [pages] * len(groups), 32, prefix=PrefixOptions(**options))
    return Scheduler(cache, Limits(4, 32, 60), EventLog(10_000) if log is None else log)


def serve(scheduler, *prompts, now=0.0):
    """Runs the prompts one after another, two tokens each."""
    for i, prompt in enumerate(prompts):
        scheduler.add(Request(f"{i} at {now}", list(prompt), SamplingParams(max_tokens=2)), now)
        while scheduler.has_work:
            step = scheduler.schedule(now)
            scheduler.cache.take_copies()
            scheduler.update(step, [1] * len(step.sampling), now)


def others(count, length=17):
    return [[100 * i + j for j in range(length)] for i in range(count)]


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("design", ["hash", "radix"])
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_every_page_that_was_evicted_is_in_an_event(kind, design, eviction):
    scheduler = scheduler_of(kind, design=design, eviction=eviction)
    serve(scheduler, *others(6))
    found = scheduler.events.of("evict")
    dropped = scheduler.cache.prefix.counters.evicted
    assert 0 < sum(event.pages for event in found) == dropped
    assert {e.reason.split(";")[0] for e in found} == {f"pool: {eviction}, its place was needed"}
    assert all(event.request_id == "" and event.step > 0 for event in found)


def test_pages_are_named_and_their_group_where_there_are_several():
    said = {}
    for kind in ("full", "both"):
        scheduler = scheduler_of(kind)
        serve(scheduler, *others(3))
        # eight pages, five for each request: the oldest go, and of one request its end first
        said[kind] = [event.reason.partition("; ")[2] for event in scheduler.events.of("evict")]
    assert said["full"] == ["4", "3, 2, 1, 7"]
    assert said["both"] == ["full 4", "sliding8 2", "full 3, 2, 1, 7", "sliding8 1, 4, 3, 5"]
    scheduler = scheduler_of(pages=16)
    serve(scheduler, *others(5, 9))
    assert scheduler.cache.prefix.clear() == 10
    assert scheduler.events.of("evict")[-1].reason == "pool: cleared; 2, 1, 4, 3, 6, 5, 8, 7, ..."


def test_time_a_change_of_weights_and_bad_numbers_are_reasons_too():
    scheduler = scheduler_of(eviction="ttl", ttl=5.0)
    serve(scheduler, *others(1))
    serve(scheduler, [7] * 5, now=6.0)
    [event] = scheduler.events.of("evict")
    assert (event.now, event.pages) == (6.0, 4) and event.reason.startswith("pool: unused for 5 s; ")
    assert scheduler.cache.prefix.clear() == 1
    last = scheduler.events.of("evict")[-1]
    assert last.reason.startswith("pool: cleared; ") and last.now == 6.0, "nobody told the time since"
    scheduler.add(Request("bad", [9] * 9, SamplingParams(max_tokens=9)), 7.0)
    for tokens in ([1], [None]):
        scheduler.update(scheduler.schedule(7.0), tokens, 7.0)
    assert scheduler.events.of("evict")[-1].reason.startswith("pool: a reader's numbers are not finite; ")


def test_nothing_is_named_where_evictions_are_only_counted(monkeypatch):
    """Counted operations of the prefix cache stay what they are; here even the names of pages are never asked for."""
    scheduler = scheduler_of(log=EventLog(64, only_counted=("evict",)))
    monkeypatch.setattr(scheduler.cache.prefix, "named", None)
    serve(scheduler, *others(6))
    assert scheduler.events.counts["evict"] > 0 and not scheduler.events.of("evict")
    before, pages = scheduler.events.counts["evict"], scheduler.cache.prefix.clear()
    assert pages > 1 and scheduler.events.counts["evict"] == before + 1, "occasions are counted, not pages"


@pytest.mark.parametrize("name", STORIES)
def test_every_decision_of_every_story_has_a_reason(name):
    """A chunk, a draft and a token are what was left to do: their numbers say it all."""
    used = story_params(STORIES[name])
    scheduler, heard = story_scheduler(used), []
    scheduler.events.subscribe(heard.append)
    with recording(scheduler) as recorder:
        run(scheduler, story_requests(used))
    assert not [e for e in heard if not e.reason and e.kind not in ("chunk", "draft", "token")]
    told = [said for snapshot in json.loads(json.dumps(recorder.snapshots)) for said in snapshot["events"]]
    assert [kind for kind, _, _ in told] == [event.kind for event in heard]
    if name == "kept pages make room":
        assert "evict" in {event.kind for event in heard}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_sentence_that_says_why(kind):
    said = sentence(Event(1, 0.0, kind, "A", "because", 2, 3))
    assert said.endswith(".") and ("because" in said or kind == "token")
    nobodys = sentence(Event(1, 0.0, kind, "", "because", 2, 3))
    assert kind not in ("evict", "lost") or nobodys[0].isalnum()


OF_BOTH = ("lost", "compress", "save", "load", "draft", "accept")


@pytest.mark.parametrize("kind", OF_BOTH)
def test_a_sentence_of_tokens_and_pages_names_what_there_is(kind):
    said = {(t, p): sentence(Event(1, 0.0, kind, "A", "because", t, p)) for t in (0, 1, 2) for p in (0, 1, 3)}
    for (tokens, pages), text in said.items():
        assert " 0 " not in text and "(0" not in text and "()" not in text
        assert ("token" in text, "page" in text) == (tokens > 0, pages > 0)
    if kind == "lost":
        assert said[0, 1] == "A: 1 page of lower tiers is lost: because."
        assert said[2, 3] == "A: 2 tokens, 3 pages of lower tiers are lost: because."
