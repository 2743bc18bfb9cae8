"""The step-through in a kernel: its stories, what it shows of a recording, and the table that stands for it."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("anywidget", reason="anywidget is not installed")

from kvlab.schedule.snapshots import recording
from kvlab.schedule.story import DEFAULTS, STORIES, run, story_params, story_requests, story_scheduler, story_state
from kvlab.widgets import StepThrough
from kvlab.widgets.kernel import front_end
from kvlab.widgets.live import answer

VIEW = "application/vnd.jupyter.widget-view+json"


def test_it_starts_with_a_named_story_and_changes_to_it() -> None:
    widget = StepThrough("the pool runs out", pages=9)
    assert widget.params == {**DEFAULTS, **STORIES["the pool runs out"], "pages": 9}
    assert widget.state == story_state({**STORIES["the pool runs out"], "pages": 9})
    with pytest.raises(ValueError, match="story 'nothing': must be one of three requests"):
        StepThrough("nothing")
    with pytest.raises(ValueError, match="pages 0"):
        StepThrough(pages=0)


def test_one_cell_serves_notebook_and_page() -> None:
    bundle, _ = StepThrough()._repr_mimebundle_()
    assert bundle[VIEW]["model_id"]
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</th>", bundle["text/html"])
    assert rows[:3] == ["start", "step 1, before the model", "step 1, after the model"]
    assert "A: [1, 2, 3]; B: [4, 5]" in bundle["text/html"]


def test_a_message_is_answered_with_the_story() -> None:
    reply = StepThrough().handle({"kind": "compute", "id": 4, "params": {"pages": 20}})
    assert (reply["ok"], reply["state"]) == (True, story_state({"pages": 20}))
    assert answer("step_through", {"kind": "compute", "id": 5, "params": {"pages": 0}})["error"].startswith("pages 0")


def test_a_recording_is_shown_as_it_was_without_settings() -> None:
    params = story_params(STORIES["layers of both kinds"])
    scheduler = story_scheduler(params)
    with recording(scheduler) as recorder:
        run(scheduler, story_requests(params))
    widget = StepThrough.of(recorder)
    assert widget.state == {k: v for k, v in story_state(params).items() if k != "params"}
    assert "stories" not in widget.data and "[0, 2, 3, 4]" in widget.fallback_table()
    assert json.loads(json.dumps(widget.get_state(["state", "data", "params"])))["params"] == {}


def test_a_notebook_gets_one_module_without_imports() -> None:
    for name in ("explorer", "step_through"):
        text = front_end(name)
        assert not re.search(r"^import ", text, re.M) and text.count("function node(") == 1
        assert text.count("export ") == 1
