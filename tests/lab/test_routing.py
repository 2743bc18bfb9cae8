"""Replicas that cache prefixes: what a router does to their hit rates and loads."""

from __future__ import annotations

import pytest

from kvlab.lab.routing import (
    Arrival,
    HashRing,
    Replica,
    arrivals,
    hit_rate,
    imbalance,
    longest_match,
    replay,
    round_robin,
)

NAMES = [f"replica {i}" for i in range(4)]


def test_a_replica_finds_prefixes_and_forgets_the_end_of_the_oldest_first() -> None:
    replica = Replica("one", capacity=6)
    first, again, other = Arrival(0, "a", 3, 1), Arrival(1, "a", 3, 1), Arrival(2, "b", 2, 1)
    assert [replica.serve(first), replica.serve(again)] == [0, 3]
    assert replica.serve(other) == 0
    # room for 6 of the 8 pages met: the ends of the two a's leave, what they share stays
    assert list(replica.cached) == [("a", 2), ("a", 1), ("a", 0), ("b 2", 0), ("b", 1), ("b", 0)]
    assert replica.matched(Arrival(3, "a", 3, 1)) == 3
    assert (replica.asked, replica.found, replica.requests) == (11, 3, 3)


def test_a_match_ends_at_the_first_gap() -> None:
    replica = Replica("one", capacity=9)
    replica.serve(Arrival(0, "a", 3, 0))
    del replica.cached["a", 1]
    assert replica.matched(Arrival(1, "a", 3, 0)) == 1


def test_round_robin_gives_every_replica_the_same_mix_and_the_same_low_rate() -> None:
    load = arrivals(4000, 40, shared=10, own=2, seed=3)
    even = replay(load, round_robin, NAMES, capacity=120)
    assert imbalance(even) == 1
    rates = [replica.hit_rate for replica in even]
    assert max(rates) - min(rates) < 0.05
    owned = replay(load, HashRing(NAMES), NAMES, capacity=120)
    assert hit_rate(owned) > hit_rate(even) + 0.15


def test_with_room_for_all_prefixes_the_router_matters_little() -> None:
    load = arrivals(4000, 40, shared=10, own=2, seed=3)
    rates = [hit_rate(replay(load, router, NAMES, 10_000)) for router in (round_robin, HashRing(NAMES), longest_match)]
    assert max(rates) - min(rates) < 0.04
    assert max(rates) <= 10 / 12


def test_a_popular_prefix_overloads_its_owner_unless_load_is_bounded() -> None:
    load = arrivals(4000, 40, shared=10, own=2, skew=1.5, seed=3)
    owned, bounded = (replay(load, HashRing(NAMES, slack=slack), NAMES, 120) for slack in (None, 0.25))
    assert imbalance(owned) > 1.5
    assert imbalance(bounded) <= 1.26
    assert hit_rate(owned) - hit_rate(bounded) < 0.1


def test_a_new_replica_takes_its_share_of_the_keys_and_moves_no_other() -> None:
    keys = [f"prefix {i}" for i in range(2000)]
    before, after = HashRing(NAMES), HashRing([*NAMES, "replica 4"])
    moved = [key for key in keys if before.owners(key)[0] != after.owners(key)[0]]
    assert {after.owners(key)[0] for key in moved} == {"replica 4"}
    assert 0.1 < len(moved) / len(keys) < 0.3


def test_owners_are_all_replicas_once() -> None:
    assert sorted(HashRing(NAMES).owners("x")) == NAMES


@pytest.mark.parametrize("seed", range(5))
def test_no_router_finds_more_than_is_shared(seed) -> None:
    load = arrivals(300, 7, shared=3, own=1, seed=seed)
    first_times = len({a.prefix for a in load})
    for router in (round_robin, longest_match, HashRing(NAMES), HashRing(NAMES, slack=0.1)):
        replicas = replay(load, router, NAMES, 1000)
        assert sum(r.requests for r in replicas) == 300
        assert sum(r.found for r in replicas) <= 3 * (300 - first_times)
