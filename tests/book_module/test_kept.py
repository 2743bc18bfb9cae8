"""The picture of what a layer keeps: its bars are what the specs say is held, for every kind of part."""

from __future__ import annotations

import pytest

from kvlab.book.kept import GONE, kept_figure, show_kept, spec_table
from kvlab.specs import catalogue
from kvlab.specs.families import from_config


def model(name: str):
    return from_config(catalogue.get(name), name=name)


def held(trace) -> float:
    """Tokens under the bars of a row that are not grey."""
    return sum(x for x, colour in zip(trace.x, trace.marker.color, strict=True) if colour != GONE)


def test_a_full_layer_holds_every_token_twice() -> None:
    fig = kept_figure(model("llama-2-7b"), 700)
    assert {trace.name: held(trace) for trace in fig.data} == {"k": 700, "v": 700}


def test_a_window_gives_back_what_is_older() -> None:
    fig = kept_figure(model("gemma-3-27b"), 3000)
    rows = {trace.name: held(trace) for trace in fig.data}
    assert rows == {"k": 3000, "v": 3000, "W 1,024 k": 1024, "W 1,024 v": 1024}
    window = next(trace for trace in fig.data if trace.name == "W 1,024 k")
    assert sum(window.x) == 3000 and window.base[-1] == 3000 - 1024


def test_a_compressed_entry_stands_for_its_tokens_and_the_open_window_has_none() -> None:
    fig = kept_figure(model("deepseek-v4-pro"), 300)
    entries = next(trace for trace in fig.data if trace.name == "1/128 entry")
    assert list(entries.base) == [0, 128]


def test_a_state_stands_beside_the_tokens() -> None:
    fig = kept_figure(model("jamba-1.5-mini"), 100)
    state = next(trace for trace in fig.data if trace.name == "state")
    assert state.base[0] > 100 and len(fig.data) == 4


@pytest.mark.parametrize("name", catalogue.names())
def test_every_model_of_the_catalogue_is_drawn_with_its_message(name, capsys) -> None:
    show_kept(model(name), 517)
    spec_table(model(name))
    said = capsys.readouterr().out
    assert f"After 517 tokens {name} keeps in each layer: " in said and "The parts of" in said


def test_rows_of_one_name_stay_apart() -> None:
    names = [trace.name for trace in kept_figure(model("deepseek-v4-pro"), 300).data]
    assert len(set(names)) == len(names)


def test_no_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens 0"):
        kept_figure(model("llama-2-7b"), 0)
