"""The step-through: block pool, tables, free list and queue after every step, both ways (front end: step_through.mjs)."""

from __future__ import annotations

from typing import Any

from kvlab.schedule.snapshots import Recorder
from kvlab.schedule.story import CHOICES, DEFAULTS, STORIES, recorded_state, story_params, story_state
from kvlab.widgets.kernel import FOLDER, LiveWidget, front_end
from kvlab.widgets.live import table_html

MOST_ROWS = 60


def front_end_data() -> dict[str, Any]:
    """What the front end's settings offer."""
    choices = {name: list(known) for name, known in CHOICES.items()}
    return {"defaults": DEFAULTS, "stories": STORIES, "choices": choices, "folded": "The same as a table, step by step"}


def fallback_table(state: dict[str, Any]) -> str:
    """The story as a table: a row for every moment, at most `MOST_ROWS` of them."""
    header = ["Moment", "What happened", "Waiting", "Running", "Block tables", "Free pages, next first"]
    rows = [[
        moment(shot),
        " ".join(text for _, _, text in shot["events"]) or "-",
        ", ".join(shot["waiting"]) or "-", ", ".join(shot["running"]) or "-",
        "; ".join(f"{name}: {_tables(tables)}" for name, tables in shot["tables"].items()) or "-",
        _lists(shot["free"]) + (f"; kept {_lists(shot['idle'])}" if "idle" in shot else ""),
    ] for shot in state["snapshots"][:MOST_ROWS]]  # fmt: skip
    return table_html("Block pool and queue, step by step; 0 in a table is a page given back", header, rows)


def moment(shot: dict[str, Any]) -> str:
    """When a snapshot was taken, in words."""
    if shot["phase"] in ("start", "end"):
        return str(shot["phase"])
    return f"step {shot['step']}, {'before' if shot['phase'] == 'taken' else 'after'} the model"


def _lists(pages: list[list[int]]) -> str:
    return " / ".join(", ".join(map(str, own)) or "none" for own in pages)


def _tables(tables: list[list[int]]) -> str:
    return " and ".join("[" + ", ".join(map(str, table)) + "]" for table in tables)


class StepThrough(LiveWidget):
    """A story, `StepThrough(pages=8)` or `StepThrough(story="the pool runs out")`, or `StepThrough.of(recorder)`.

    Settings are those of `kvlab.schedule.story.story_state`. A recording is shown as it was: it has no settings.
    """

    _esm = front_end("step_through")
    _css = FOLDER / "step_through.css"

    def __init__(self, story: str = "", **params: Any) -> None:
        if story and story not in STORIES:
            raise ValueError(f"story {story!r}: must be one of {', '.join(STORIES)}")
        params = story_params({**STORIES.get(story, {}), **params})
        super().__init__(widget="step_through", params=params, state=story_state(params), data=front_end_data())

    @classmethod
    def of(cls, recorder: Recorder) -> StepThrough:
        """The steps that `recorder` saw, an engine's for example: see `kvlab.schedule.snapshots.recording`."""
        widget = cls()
        widget.params, widget.data = {}, {"folded": front_end_data()["folded"]}
        widget.state = recorded_state(recorder)
        return widget

    def fallback_table(self) -> str:
        """Every moment of the story, as a table."""
        return fallback_table(dict(self.state))
