"""The five workloads: what is shared in them, what a cache finds, and what each change costs."""

import pytest

from kvlab.cache import PrefixOptions
from kvlab.cache.prefix import DESIGNS
from kvlab.lab import workloads
from kvlab.lab.workloads import BREAKERS, WORKLOADS, broken, replay
from kvlab.specs.formats import get_format
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import Attention

BF16 = get_format("bf16")
MODEL = ModelSpec("m", "llama", (LayerSpec(0, (Attention(8, 128, 128, BF16),)),), 4096, 32, 32_000)
SMALL = {
    "system prompt": {"system": 96, "users": 12, "question": 10, "output": 9},
    "RAG": {"requests": 12, "passages": 10, "retrieved": 2, "passage": 48, "system": 32, "question": 10},
    "code completion": {"editors": 2, "requests": 8, "files": 100, "instructions": 32},
    "multi-turn chat": {"users": 3, "turns": 4, "system": 48, "question": 10, "output": 20},
    "few-shot": {"requests": 12, "tasks": 2, "shots": 3, "shot": 20, "question": 10},
}


def small(name):
    return WORKLOADS[name](**SMALL[name])


def by_hand(workload, page=16):
    """Hit tokens of a cache without end: the longest run of whole pages that an earlier text began with."""
    known, hits = set(), 0
    for turn in workload.turns:
        n = 0
        while n + page < len(turn.prompt) and (turn.salt, turn.prompt[: n + page]) in known:
            n += page
        hits += n
        # the last token that is said is never put into the cache
        whole = (*turn.prompt, *workloads.answer(turn))[:-1]
        known |= {(turn.salt, whole[:end]) for end in range(page, len(whole) + 1, page)}
    return hits


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_both_designs_find_what_is_there(name, design):
    workload = small(name)
    found = replay(workload, MODEL, PrefixOptions(design))
    assert (found.queries, found.hits) == (workload.prompt_tokens, by_hand(workload)) and found.hits
    assert found.bytes_saved + found.bytes_computed == workload.prompt_tokens * MODEL.bytes_per_token
    assert found.evicted == 0
    assert workload.parameters == small(name).parameters and workload == small(name)


@pytest.mark.parametrize("change", [*BREAKERS, "another tokenizer half-way"])
def test_each_change_costs_what_whole_histories_say(change):
    for name in ("system prompt", "multi-turn chat"):
        workload = broken(small(name), change)
        assert replay(workload, MODEL, PrefixOptions()).hits == by_hand(workload)


@pytest.mark.parametrize("change", [*BREAKERS, "another tokenizer half-way"])
def test_a_later_turn_carries_the_reply_that_was_given_to_the_one_before(change):
    """Else no reply would ever be found, and a change that leaves a chat whole would look as if it cost something."""
    workload = broken(small("multi-turn chat"), change)
    last, carried = {}, 0
    half = len(workload.turns) // 2 if "tokenizer" in change else 0
    for i, turn in enumerate(workload.turns):
        reply = last.get(turn.user)
        if reply is not None and (not half or i < half or reply[0] >= half):
            said = reply[1]
            assert any(turn.prompt[at : at + len(said)] == said for at in range(len(turn.prompt) - len(said)))
            carried += 1
        last[turn.user] = (i, tuple(workloads.answer(turn)))
    assert carried >= 6


def test_a_session_id_of_a_user_s_own_isolates_as_a_salt_does():
    chats = {change: replay(broken(WORKLOADS["multi-turn chat"](users=3, turns=4, system=48, question=20, output=32), change),
                            MODEL, PrefixOptions()) for change in ("session id at the start", "a salt for each user")}  # fmt: skip
    session, salt = chats.values()
    assert 0 < salt.hits <= session.hits <= salt.hits + 16 * 3 * 3


def test_what_stands_first_breaks_everything_and_what_stands_last_nothing():
    rates = {change: replay(broken(small("system prompt"), change), MODEL, PrefixOptions()).hit_rate
             for change in BREAKERS}  # fmt: skip
    assert rates["timestamp at the start"] == rates["session id at the start"] == rates["a salt for each user"] == 0
    assert 0 < rates["JSON keys in any order"] < rates["a template's whitespace"] < rates["nothing"]
    assert rates["timestamp at the end"] > 0.7
    with pytest.raises(ValueError, match="change 'rain'"):
        broken(small("few-shot"), "rain")


@pytest.mark.parametrize("design", DESIGNS)
def test_a_small_pool_finds_less(design):
    workload = small("multi-turn chat")
    whole, few = (replay(workload, MODEL, PrefixOptions(design), pages) for pages in (None, 14))
    assert few.hits < whole.hits and few.evicted and few.peak_pages <= 14
    with pytest.raises(ValueError, match="does not fit"):
        replay(workload, MODEL, PrefixOptions(design), 5)


def test_passages_in_a_fixed_order_are_found_more_often():
    asked = {"requests": 40, "passages": 10, "retrieved": 3, "passage": 48, "system": 32, "question": 10, "skew": 1.0}
    by_score, by_number = (WORKLOADS["RAG"](**asked, popular_first=fixed) for fixed in (False, True))
    assert [sorted(t.prompt) for t in by_number.turns] == [sorted(t.prompt) for t in by_score.turns]
    hits = [replay(load, MODEL, PrefixOptions()).hits for load in (by_score, by_number)]
    assert hits == [by_hand(by_score), by_hand(by_number)] and hits[0] < hits[1]
