"""The draggable figure of chapter 15: complete, and every mark lies where two caches are equal."""

from __future__ import annotations

import pytest

from kvlab.book.crossings import ARCHITECTURES, CONTEXTS, crossing_points, crossings_figure, models, ways_to_keep
from kvlab.specs import catalogue
from kvlab.specs.families import from_config


def test_every_way_to_keep_in_the_catalogue_has_a_line() -> None:
    shown = {ways_to_keep(model) for model in models().values()}
    assert {ways_to_keep(from_config(catalogue.get(name), name=name)) for name in catalogue.names()} <= shown


@pytest.mark.parametrize("label", [label for label, _ in ARCHITECTURES])
def test_a_mark_lies_where_the_smaller_cache_becomes_the_larger(label) -> None:
    model = models()[label]
    for tokens, size, other in crossing_points(label):
        than = models()[other]
        before, after = (model.bytes_at(n) < than.bytes_at(n) for n in (tokens - 1, tokens))
        assert before != after and size == model.bytes_at(tokens) and CONTEXTS[0] < tokens <= CONTEXTS[-1]


def test_every_step_of_a_slider_moves_only_what_it_names() -> None:
    fig = crossings_figure()
    lines = len(ARCHITECTURES)
    pick, read = fig.layout.sliders
    assert [step.label for step in pick.steps] == [label for label, _ in ARCHITECTURES]
    assert all(list(step.args[1]) == [lines, lines + 1] for step in pick.steps)
    assert len(read.steps) == len(CONTEXTS) and all(list(step.args[2]) == [lines + 2] for step in read.steps)


def test_the_figure_starts_where_its_sliders_stand() -> None:
    fig = crossings_figure()
    lines = len(ARCHITECTURES)
    pick, read = fig.layout.sliders
    assert list(fig.data[lines].y) == list(pick.steps[pick.active].args[0]["y"][0])
    assert list(fig.data[lines + 2].x) == list(read.steps[read.active].args[0]["x"][0])
    assert fig.layout.annotations[0].text == read.steps[read.active].args[1]["annotations[0].text"]
