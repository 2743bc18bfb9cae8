"""Contiguous regions: exact places, the three wastes, and a bitmap as oracle."""

import random

import pytest

from kvlab.cache.contiguous import ContiguousPool, SlotUse, reserved_tokens, slot_use


def test_a_long_request_waits_although_two_gaps_together_would_do():
    pool = ContiguousPool(100)
    assert [pool.reserve(name, 32) for name in "abc"] == [range(0, 32), range(32, 64), range(64, 96)]
    assert pool.free("a") == 32 and pool.free("c") == 32
    assert list(pool.gaps()) == [range(0, 32), range(64, 100)] and pool.num_free == 68
    assert pool.reserve("d", 40) is None
    use = slot_use(pool, {"b": 5}, {"b": 20}, next_size=40)
    assert use == SlotUse(used=5, later=15, never=12, gaps=68, short=0)
    assert slot_use(pool, {"b": 5}, {"b": 20}, next_size=69).short == 68
    assert slot_use(pool, {"b": 5}, {"b": 20}, next_size=36).short == 68  # it would fit: no fragmentation
    assert pool.reserve("d", 33) == range(64, 97)


@pytest.mark.parametrize("seed", [0])
def test_equal_regions_leave_no_gap_that_a_request_misses(seed):
    rng = random.Random(1 + seed)
    pool, names = ContiguousPool(10 * 7 + 3), iter(range(10_000))
    for _ in range(500):
        if pool.regions and rng.random() < 0.5:
            pool.free(rng.choice(list(pool.regions)))
        fits = pool.num_free >= 7
        assert (pool.reserve(str(next(names)), 7) is not None) == fits


@pytest.mark.parametrize("seed", range(5))
def test_regions_are_those_of_a_bitmap(seed):
    rng = random.Random(seed)
    pool, bits, names = ContiguousPool(60), [None] * 60, iter(range(10_000))
    for _ in range(400):
        if pool.regions and rng.random() < 0.5:
            name = rng.choice(list(pool.regions))
            assert pool.free(name) == bits.count(name)
            bits = [None if b == name else b for b in bits]
        name, size = str(next(names)), rng.randint(1, 25)
        start = next((i for i in range(61 - size) if bits[i : i + size] == [None] * size), None)
        region = pool.reserve(name, size)
        assert (region.start if region else None) == start
        if region:
            bits[start : start + size] = [name] * size
        assert pool.num_free == bits.count(None)
        runs = "".join("." if b is None else "x" for b in bits).split("x")
        assert pool.largest_gap == max(map(len, runs))


def test_what_each_rule_reserves():
    assert reserved_tokens("max", 100, 60, 2048) == 2048
    assert reserved_tokens("exact", 100, 60, 2048) == 160
    assert [reserved_tokens("pow2", 100, n, 2048) for n in (1, 2, 3, 60, 64, 65)] == [101, 102, 104, 164, 164, 228]
    assert reserved_tokens("pow2", 1000, 1040, 2048) == 2048
    with pytest.raises(ValueError, match="rule 'half'"):
        reserved_tokens("half", 1, 1, 10)
    with pytest.raises(ValueError, match="request of 11 tokens: must be at most 10"):
        reserved_tokens("max", 5, 6, 10)
    with pytest.raises(ValueError, match="capacity 0"):
        ContiguousPool(0)
