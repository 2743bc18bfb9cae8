"""What the simulator widget shows: the figures of kvlab.simulate, progress, an early end, and errors that name the row."""

from __future__ import annotations

import json

import pytest

from kvlab.simulate import parse_trace, simulate
from kvlab.simulate.page import DEFAULTS, example, simulate_params, simulate_state

CSV = "num_prefill_tokens,num_decode_tokens\n100,20\n3000,30\n200,1\n"


def card(state: dict, name: str) -> str:
    return next(value for term, value, _ in state["cards"] if term == name)


def test_the_figures_are_those_of_the_simulation() -> None:
    state = simulate_state({"trace": CSV, "rate": 4.0, "tp": 8})
    trace = parse_trace(CSV.splitlines()).arriving([0.0, 0.25, 0.5])
    found = simulate(trace, DEFAULTS["model"], gpu="h200", tp=8, weight_dtype="bf16", prefix="hash").to_json()
    assert card(state, "Finished") == "3 of 3" and card(state, "Preemptions") == "0"
    assert [row[:2] for row in state["rows"]] == [["all", "3"], ["1-512", "2"], ["2049-8192", "1"]]
    assert state["rows"][0][2] == f"{1e3 * found['latency']['all']['ttft_s']['p50']:,.1f} ms"
    assert state["rows"][0][5] == f"{1e3 * found['latency']['all']['itl_s']['p50']:,.1f} ms"
    assert json.loads(json.dumps(state, allow_nan=False)) == state


def test_shared_beginnings_of_the_example_are_found_and_not_without_a_cache() -> None:
    found = simulate_state({})
    assert float(card(found, "Prompt tokens found in the cache").split()[0]) > 20
    assert card(simulate_state({"prefix": "off"}), "Prompt tokens found in the cache") == "0.0 %"
    assert found["params"]["trace"] == example() and len(example().splitlines()) == 60


def test_it_says_how_far_it_is_and_ends_early_when_told_to() -> None:
    rows = "\n".join(f"{100 + i},{20 + i % 7}" for i in range(300))
    told = []

    def tell(done: int, of: int, text: str) -> bool:
        told.append((done, of, text))
        return len(told) == 2

    state = simulate_state({"trace": f"num_prefill_tokens,num_decode_tokens\n{rows}", "rate": 20.0}, tell)
    assert len(told) == 2 and told[0][0] < told[1][0] < 300 == told[0][1]
    assert "of 300 requests ended after" in told[0][2] and state["cancelled"]
    assert not simulate_state({"trace": CSV})["cancelled"]


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"colour": 1}, "setting 'colour'"),
        ({"tp": 0}, "tp 0: must be a whole number from 1 to 16"),
        ({"model": "none"}, "model 'none'"),
        ({"rate": 0}, "rate 0"),
        ({"trace": 3}, "trace: must be text"),
        ({"trace": "hello"}, "the trace, row 1"),
        ({"trace": CSV + "7,x"}, "num_decode_tokens 'x' must be a number"),
        ({"model": "deepseek-v3", "tp": 1, "trace": CSV}, "no room for a cache"),
    ],
)
def test_what_cannot_be_is_named(params: dict, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        simulate_state(params)


def test_defaults_are_never_changed() -> None:
    before = dict(DEFAULTS)
    simulate_params({"tp": 2})
    assert before == DEFAULTS
