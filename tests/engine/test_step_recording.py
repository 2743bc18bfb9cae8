"""The widget's story and the engine, given the same requests: the same block tables and free list at every step."""

from __future__ import annotations

import pytest
from kinds import kind

from kvlab.engine import Engine, SamplingParams
from kvlab.schedule.snapshots import recording
from kvlab.schedule.story import recorded_state, story_state

REQUESTS = [[9, 10, 0, 0], [8, 10, 0, 0], [7, 6, 1, 0]]


@pytest.mark.parametrize("pages", [8, 40], ids=["too few pages", "enough"])
def test_an_engine_takes_the_pages_that_the_story_shows(pages) -> None:
    story = story_state({"pages": pages, "requests": REQUESTS})
    used = story["params"]
    engine = Engine(
        kind("full").model, block_size=used["block_size"], num_blocks=pages + 1, max_num_seqs=used["max_seqs"],
        max_batched_tokens=used["budget"], max_model_len=80, check=True,
    )  # fmt: skip
    with recording(engine.scheduler) as recorder:
        step = 0
        left = list(REQUESTS)
        while left or engine.scheduler.has_work:
            while left and left[0][2] <= step:
                prompt, new, _, _ = left.pop(0)
                engine.add_request([5 + p for p in range(prompt)], SamplingParams(max_tokens=new, ignore_eos=True))
            engine.step()
            step += 1
    recorded = recorded_state(recorder)
    assert recorded["pools"] == story["pools"] and len(recorded["snapshots"]) == len(story["snapshots"])
    for own, shown in zip(recorded["snapshots"], story["snapshots"], strict=True):
        renamed = {name: own["tables"][str("ABC".index(name))] for name in shown["tables"]}
        assert renamed == shown["tables"] and own["free"] == shown["free"]
        assert [c[1:] for c in own["chunks"]] == [c[1:] for c in shown["chunks"]]
    assert bool(story["counts"].get("preempt")) == (pages == 8)
