"""What the step-through widget shows: exact pages of small stories, exact copies, and an engine's own steps."""

import copy
import json

import pytest

from kvlab.schedule.snapshots import recording
from kvlab.schedule.story import (
    DEFAULTS,
    STORIES,
    recorded_state,
    run,
    story_params,
    story_requests,
    story_scheduler,
    story_state,
)


def seen(state, phase):
    return [s for s in state["snapshots"] if s["phase"] == phase]


def test_six_blocks_of_which_one_request_gives_three_back():
    state = story_state(STORIES["six blocks, one comes back"])
    start, taken, done, second = state["snapshots"][:4]
    assert start["free"] == [[1, 2, 3, 4, 5, 6]] and start["tables"] == {}
    assert taken["tables"] == {"A": [[1, 2, 3]], "B": [[4, 5]]} and taken["free"] == [[6]]
    assert taken["chunks"] == [["A", 0, 11, True, list(range(4, 15))], ["B", 0, 7, True, list(range(16, 23))]]
    assert done["requests"]["A"] == [12, 11, "length"] and done["free"] == [[1, 2, 3, 6]]
    assert second["tables"] == {"B": [[4, 5]], "C": [[1, 2]]}


def test_each_snapshot_lists_free_and_held_pages_that_make_the_pool():
    for params in STORIES.values():
        state = story_state(params)
        for shot in state["snapshots"]:
            for g, pool in enumerate(state["pool_of"]):
                held = {page for tables in shot["tables"].values() for page in tables[g] if page}
                idle = shot["idle"][pool] if "idle" in shot else []
                assert sorted([*shot["free"][pool], *idle, *held]) == list(range(1, state["pools"][pool] + 1))


def test_a_request_that_loses_its_pages_waits_and_runs_again():
    state = story_state(STORIES["the pool runs out"])
    told = [event for shot in state["snapshots"] for event in shot["events"]]
    lost = next(i for i, event in enumerate(told) if event[0] == "preempt")
    name = told[lost][1]
    assert "needs pages" in told[lost][2] and ["admit", name] in [event[:2] for event in told[lost:]]
    assert state["counts"]["finish"] == 3 and not state["cut"]


def test_pages_behind_a_window_become_null_in_the_table():
    shots = seen(story_state(STORIES["a window gives pages back"]), "done")
    assert shots[0]["tables"]["A"] == [[0, 2, 3, 4]]
    assert shots[0]["events"][0] == ["release", "A", "A gives back 1 page: behind every window."]


def test_two_kinds_of_layers_have_a_table_and_a_pool_each():
    state = story_state(STORIES["layers of both kinds"])
    assert state["groups"] == [["full", 4, "all", 0], ["sliding8", 4, "window", 8]] and state["pools"] == [12, 12]
    assert seen(state, "done")[0]["tables"]["A"] == [[1, 2, 3, 4], [0, 2, 3, 4]]


def test_a_shared_beginning_is_found_page_by_page_and_kept_when_nobody_holds_it():
    shots = story_state(STORIES["a shared beginning"])["snapshots"]
    second = next(s for s in shots if s["tables"].keys() == {"A", "B"})
    assert second["tables"] == {"A": [[1, 2, 3, 4]], "B": [[1, 2, 3, 5]]}
    assert ["hit", "B", "B finds 12 tokens in the cache: in the pool."] in second["events"]
    assert second["chunks"][-1][:3] == ["B", 12, 3]
    assert (shots[-1]["free"], shots[-1]["idle"]) == ([[7, 8, 9, 10, 11, 12]], [[4, 5, 6, 3, 2, 1]])
    assert shots[-1]["cached"][0] == {
        "1": "0-3", "2": "4-7", "3": "8-11", "4": "1012-1015", "5": "2012-2015", "6": "3012-3015",
    }  # fmt: skip
    [first] = shots[-1]["prefix"]["entries"]
    [second_link] = first["children"]
    assert (first["text"], second_link["text"]) == ("tokens 0-3; pages 1", "tokens 4-7; pages 2")
    assert len(second_link["children"][0]["children"]) == 3


def test_a_node_is_split_where_a_request_leaves_it_and_kept_pages_make_room_from_their_end():
    shots = story_state(STORIES["a tree of beginnings"])["snapshots"]
    [whole] = shots[2]["prefix"]["entries"]
    assert (whole["label"], whole["text"]) == ("0-11", "tokens 0-11; pages 1, 2, 3; locked by 1")
    split = next(s for s in shots if s["requests"].get("B", [0, 0, ""])[1] > 8)["prefix"]["entries"]
    assert [e["label"] for e in split] == ["0-7"]
    assert [c["text"] for c in split[0]["children"]] == [
        "tokens 8-11, 1012-1015; pages 3, 4; evictable from its end",
        "tokens 2008-2011; pages 5; locked by 1",
    ]
    tight = story_state(STORIES["kept pages make room"])["snapshots"]
    assert ["hit", "C"] in [e[:2] for s in tight for e in s["events"]]
    before, after = (s for s in tight if s["step"] == 7)
    assert before["tables"] == {"B": [[4, 5, 6, 7, 3]]} and before["idle"] == [[2, 1]]
    assert after["idle"] == [[2, 1, 7, 6, 5, 4]] and after["free"] == [[3]]


def test_window_layers_need_their_tail_alone():
    params = {**STORIES["a shared beginning"], "layers": "both", "pages": 20}
    shots = story_state(params)["snapshots"]
    hit = next(s for s in shots if ["hit", "B"] in [e[:2] for e in s["events"]])
    full, window = hit["tables"]["B"]
    assert full[:3] == hit["tables"]["A"][0][:3] and window[0] == 0 and len(full) == len(window)


def test_a_request_that_can_never_fit_is_refused_and_the_others_run():
    state = story_state({"pages": 3, "requests": [[20, 1, 0, 0], [5, 2, 0, 0]]})
    events = state["snapshots"][1]["events"]
    assert events[0][:2] == ["refuse", "A"] and "pool has 3" in events[0][2]
    assert state["counts"]["finish"] == 1
    assert [s["phase"] for s in story_state({"pages": 1})["snapshots"]] == ["start", "end"]


def test_a_late_arrival_is_not_waited_for_when_nobody_runs():
    state = story_state({"requests": [[3, 1, 0, 0], [3, 1, 150, 0]]})
    assert [s["step"] for s in seen(state, "done")] == [1, 2]


def test_the_record_is_bounded_and_says_so():
    scheduler = story_scheduler(story_params({}))
    with recording(scheduler, 4) as recorder:
        run(scheduler, story_requests(story_params({})))
    assert len(recorder.snapshots) == 4 and recorder.full and not scheduler.has_work
    assert "schedule" not in vars(scheduler) and "update" not in vars(scheduler)


def test_snapshots_are_copies_and_json():
    params = story_params({**STORIES["layers of both kinds"], "prefix": "radix"})
    scheduler = story_scheduler(params)
    with recording(scheduler) as recorder:
        kept = []
        seen_take = recorder.take

        def take(*args):
            seen_take(*args)
            kept.append(copy.deepcopy(recorder.snapshots[-1]))

        recorder.take = take
        run(scheduler, story_requests(params))
    assert recorder.snapshots[1:] == kept and len(kept) > 20
    state = recorded_state(recorder)
    assert json.loads(json.dumps(state)) == state


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"colour": 1}, "setting 'colour'"),
        ({"pages": 0}, "pages 0: must be a whole number from 1 to 200"),
        ({"block_size": 4.0}, "block_size 4.0"),
        ({"layers": "none"}, "layers 'none'"),
        ({"prefix": "tree"}, "prefix 'tree': must be one of off, hash, radix"),
        ({"requests": []}, "requests: must be a list of 1 to 8"),
        ({"requests": [[4, 1, 0]]}, "request A: must be prompt, new tokens, arrives, shared"),
        ({"requests": [[4, 1, 0, 0], [0, 1, 0, 0]]}, "prompt of request B 0"),
        ({"requests": [[4, 1, 0, 5]]}, "shared of request A 5: must be at most its prompt, 4"),
    ],
)
def test_a_setting_that_cannot_be_is_named(params, error):
    with pytest.raises(ValueError, match=error.replace("(", r"\(")):
        story_state(params)


def test_the_defaults_are_never_changed():
    before = copy.deepcopy((DEFAULTS, STORIES))
    for params in STORIES.values():
        story_state(params)
    assert before == (DEFAULTS, STORIES)
