"""Policies under a load that does not fit, on a simulated machine: sums that must hold whatever the policy."""

import pytest

from kvlab.lab.pressure import Load, Machine, burst, costs_of, under_pressure
from kvlab.schedule import SchedulingPolicy

MACHINE = Machine(pages=150, max_num_seqs=16)
LOAD = burst(20, 50.0, prompt=200, output=120)


@pytest.mark.parametrize("preempt", ["recompute", "swap", "auto"])
def test_every_token_is_computed_and_only_lost_ones_again(preempt):
    policy = SchedulingPolicy(preempt=preempt, costs=costs_of(MACHINE))
    found = under_pressure(LOAD, MACHINE, policy)
    # the last token of a request is never computed
    once = sum(one.prompt + one.output - 1 for one in LOAD)
    assert found.computed_tokens == once + found.lost_tokens
    assert found.preemptions > 0
    # at these rates moving is the cheaper way for every victim
    assert (found.swaps, found.lost_tokens == 0) == (
        (0, False) if preempt == "recompute" else (found.preemptions, True)
    )
    assert 0 < found.busy_share <= 1 and len(found.finished) == len(LOAD)


def test_a_slow_link_makes_the_choice_computing():
    slow = Machine(pages=150, max_num_seqs=16, link_bytes_per_s=1e6)
    found = under_pressure(LOAD, slow, SchedulingPolicy(preempt="auto", costs=costs_of(slow)))
    assert found.preemptions > 0 and found.swaps == 0


def test_urgent_requests_finish_sooner_under_priority():
    load = [Load(0.0, 200, 60, priority=i % 2) for i in range(16)]
    machine = Machine(pages=60, max_num_seqs=4)

    def mean(found, priority):
        times = [found.finished[str(i)] for i, one in enumerate(load) if one.priority == priority]
        return sum(times) / len(times)

    fair = under_pressure(load, machine, SchedulingPolicy())
    urgent = under_pressure(load, machine, SchedulingPolicy("priority", "priority"))
    assert mean(urgent, 0) < mean(fair, 0) and mean(urgent, 1) > mean(fair, 1)
