"""Gaps between tokens from a run's events, with and without a price on transfers."""

from __future__ import annotations

import pytest

from kvlab.engine import Engine, SamplingParams
from kvlab.engine.tiers import TierOptions
from kvlab.lab.small_model import small_model
from kvlab.lab.token_gaps import token_gaps
from kvlab.schedule.events import Event
from kvlab.schedule.policy import SchedulingPolicy
from kvlab.simulate.summary import percentile


def event(step: int, kind: str, name: str, pages: int = 0) -> Event:
    return Event(step, 0.0, kind, name, pages=pages)


def test_a_gap_is_the_steps_and_the_transfers_since_the_last_token() -> None:
    told = [
        event(1, "token", "a"), event(1, "token", "b"), event(2, "token", "a"),
        event(2, "swap_out", "b", pages=3), event(4, "swap_in", "b", pages=3), event(4, "token", "b"),
        event(4, "token", "a"),
    ]  # fmt: skip
    assert token_gaps(told, 1.0, 0.0) == [1, 3, 2]
    assert token_gaps(told, 1.0, 0.5) == [2.5, 6, 3.5]


def test_no_events_no_gaps() -> None:
    assert token_gaps([], 1.0, 1.0) == []


def test_rare_swaps_raise_the_99th_percentile_and_leave_the_median(monkeypatch) -> None:
    monkeypatch.setenv("KVLAB_OPS", "torch")
    engine = Engine(
        small_model(), block_size=4, num_blocks=48, max_model_len=64, max_num_seqs=8, log_events=10**5,
        scheduling=SchedulingPolicy(preempt="swap"), tiers=TierOptions(10**6, save_prefixes=False),
    )  # fmt: skip
    for k in range(40):
        engine.add_request(
            [3 + (7 * i + k) % 61 for i in range(8)], SamplingParams(max_tokens=12 + 7 * k % 25, ignore_eos=True)
        )
    while engine.scheduler.has_work:
        engine.step()
    assert engine.events.counts["swap_in"] == engine.events.counts["swap_out"] > 0
    free, priced = (sorted(token_gaps(engine.events, 0.04, page_s)) for page_s in (0.0, 0.1))
    assert percentile(free, 50) == pytest.approx(percentile(priced, 50))
    assert percentile(priced, 95) < 0.05 < 0.2 < percentile(priced, 99)
    assert percentile(free, 99) < 0.09
