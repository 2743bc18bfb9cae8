"""Who gives way when pages run out: by each name, and by a function of the caller's."""

import random

import pytest

from kvlab.cache import KVCacheManager
from kvlab.schedule import EventLog, Limits, Request, SamplingParams, Scheduler, SchedulingPolicy, SwapCosts
from kvlab.schedule.policy import VICTIMS
from kvlab.specs.formats import get_format
from kvlab.specs.layout import group_parts
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import Attention

SPEC = ModelSpec("tiny", "llama", (LayerSpec(0, (Attention(2, 8, 8, get_format("bf16")),)),), 32, 4, 100)


def scheduler_of(policy, blocks):
    cache = KVCacheManager(group_parts(SPEC, 2), [blocks], 40)
    return Scheduler(cache, Limits(8, 40, 40), EventLog(), policy)


def add(scheduler, name, prompt, most, **fields):
    request = Request(name, [1] * prompt, SamplingParams(most), **fields)
    scheduler.add(request, 0.0)
    return request


def advance(scheduler):
    step = scheduler.schedule(0.0)
    scheduler.update(step, [7] * len(step.sampling), 0.0)
    scheduler.cache.check_invariants()


def under_pressure(policy):
    """A scheduler that has just thrown out its first victim, of four requests that differ in everything; a is senior."""
    scheduler = scheduler_of(policy, 1 + 26)
    for name, prompt, priority in (("a", 8, 0), ("b", 9, 3), ("c", 4, 1)):
        add(scheduler, name, prompt, 14, priority=priority)
    for _ in range(4):
        advance(scheduler)
    add(scheduler, "d", 11, 14, priority=2)
    while not scheduler.events.counts["preempt"]:
        advance(scheduler)
    return scheduler, scheduler.events.of("preempt")[0]


def dearest(requests):
    """The request with the most computed tokens."""
    return max(requests, key=lambda r: r.num_computed)


class Salted:
    """A policy with state of its own."""

    def __init__(self, salt):
        self.salt, self.asked = salt, 0

    def __call__(self, requests):
        self.asked += 1
        requests.reverse()
        return next(r for r in requests if r.salt == self.salt)


@pytest.mark.parametrize("victim, gone, why", [
    ("last", "d", ""), ("priority", "b", "priority 3"), ("least_progress", "d", "fewest new tokens, 2"),
    ("cheapest", "c", "cheapest to compute again"), (dearest, "b", "picked by dearest"),
    (lambda requests: requests[1], "c", "picked by <lambda>"), (Salted(""), "d", "picked by Salted"),
])  # fmt: skip
def test_the_victim_is_the_one_that_the_policy_names(victim, gone, why):
    costs = SwapCosts(1e9, 1e9, lambda n: 1e6 * n)
    scheduler, event = under_pressure(SchedulingPolicy(victim=victim, costs=costs))
    assert event.request_id == gone and why in event.reason
    while scheduler.has_work:
        advance(scheduler)
    assert scheduler.events.counts["finish"] == 4


def test_a_function_is_shown_everybody_but_the_senior_in_the_order_of_service():
    shown = []

    def first(requests):
        shown.append([r.request_id for r in requests])
        return requests[0]

    under_pressure(SchedulingPolicy("priority", victim=first))
    # by priority a 0, c 1, d 2, b 3
    assert shown == [["c", "d", "b"]]


@pytest.mark.parametrize("wrong", [None, "b", Request("b", [1], SamplingParams())])
def test_a_function_that_picks_none_of_them_is_an_error_and_harms_nobody(wrong):
    picks = [lambda _: wrong]
    policy = SchedulingPolicy(victim=lambda requests: picks[0](requests))
    scheduler = scheduler_of(policy, 1 + 8)
    requests = [add(scheduler, name, 4, 8) for name in "abc"]
    with pytest.raises(ValueError, match=r"victim <lambda>: picked .*, must pick one of the requests b"):
        while scheduler.has_work:
            advance(scheduler)
    scheduler.cache.check_invariants()
    assert not scheduler.events.counts["preempt"]
    # the next step asks again
    picks[0] = max_number
    while scheduler.has_work:
        advance(scheduler)
    assert [r.output for r in requests] == [[7] * 8] * 3 and scheduler.events.counts["preempt"]


def max_number(requests):
    return max(requests, key=lambda r: r.number)


@pytest.mark.parametrize("seed", range(5))
def test_everybody_finishes_whoever_a_function_picks(seed):
    """Nothing that a function does keeps the senior from its pages."""
    rng = random.Random(seed)
    scheduler = scheduler_of(SchedulingPolicy(rng.choice(["fcfs", "priority"]), rng.choice), 1 + 21)
    requests = []
    for i in range(12):
        requests.append(add(scheduler, str(i), rng.randint(1, 20), rng.randint(1, 20), priority=rng.randrange(3)))
        for _ in range(rng.randint(0, 3)):
            advance(scheduler)
    for _ in range(20 * sum(r.max_total for r in requests)):
        if not scheduler.has_work:
            break
        advance(scheduler)
    assert all(r.finish_reason == "length" for r in requests) and scheduler.events.counts["preempt"]


@pytest.mark.parametrize("victim", ["first", 3, None])
def test_another_victim_is_refused(victim):
    with pytest.raises(ValueError, match=f"victim {victim!r}: must be one of {', '.join(VICTIMS)}, or a function"):
        SchedulingPolicy(victim=victim)
