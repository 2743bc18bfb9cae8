"""How full pools are: small loads counted by hand, and relations that hold for any lengths."""

import statistics

import pytest

from kvlab.cache.contiguous import RULES
from kvlab.lab.occupancy import MIXES, LengthMix, contiguous, paged, tail_tokens


def test_two_regions_of_one_size_counted_by_hand():
    # 20 slots, regions of 10: a and b run, c waits; then c runs and d waits
    found = contiguous([(2, 1), (4, 3), (2, 2), (5, 1)], 20, "max", 10)
    # counted from the first end on: step 2 holds b (5 of 7) and c (2 of 4), step 3 b (6) and c (3); at step 4 d is in
    assert found.steps == 4 and found.in_flight == 2
    assert found.use == {"used": 16 / 40, "later": 6 / 40, "never": 18 / 40, "gaps": 0, "short": 0}


def test_pages_of_the_same_load_counted_by_hand():
    # 5 pages of 4: a, b and c are let in (1 + 1 + 1 pages and one to spare for each that runs), d waits
    found = paged([(2, 1), (4, 3), (2, 2), (5, 1)], 20, 4, 10)
    # step 2: a has left; b has 5 of 7 tokens in 2 pages, c 3 of 4 in one; d, of 2 pages and 2 to spare, waits
    assert found.use == {"used": 8 / 20, "later": 3 / 20, "never": 1 / 20, "gaps": 0, "short": 8 / 20}
    assert (found.in_flight, found.thrown_away) == (2, 0)


@pytest.mark.parametrize("name", MIXES)
def test_shares_make_one_and_pages_hold_more_tokens(name):
    mix = MIXES[name]
    requests = [(max(1, p // 8), max(1, o // 8)) for p, o in mix.draw(120, seed=3)]
    found = {rule: contiguous(requests, 512, rule, 256) for rule in RULES}
    pages = paged(requests, 512, 4, 256)
    for occupancy in (*found.values(), pages):
        assert sum(occupancy.use.values()) == pytest.approx(1)
    assert found["max"].use["gaps"] == 0, "equal regions: any gap will do"
    assert found["exact"].use["never"] == 0 and pages.use["gaps"] == 0
    assert pages.use["used"] > max(occupancy.use["used"] for occupancy in found.values())


def test_drawn_lengths_are_repeatable_and_have_the_means_they_say():
    mix = LengthMix(100, 0.5, 200, 0.5, 100_000)
    drawn = mix.draw(20_000, seed=1)
    assert drawn == mix.draw(20_000, seed=1) != mix.draw(20_000, seed=2)
    assert statistics.mean(p for p, _ in drawn) == pytest.approx(100, rel=0.02)
    assert statistics.mean(o for _, o in drawn) == pytest.approx(200, rel=0.02)
    assert all(p >= 1 and o >= 1 and p + o <= 2048 for mix in MIXES.values() for p, o in mix.draw(500))


def test_the_tail_of_every_residue_is_half_a_page_on_average():
    for size in (1, 8, 16, 128):
        every = [(size, n) for n in range(1, size + 1)]
        assert tail_tokens(every, size) == (size - 1) / 2


def test_too_few_requests_and_too_small_pools_are_said():
    with pytest.raises(ValueError, match="too few"):
        contiguous([(1, 1)], 20, "max", 10)
    with pytest.raises(ValueError, match="capacity 5: must hold the 10 slots"):
        contiguous([(1, 1)], 5, "max", 10)
    with pytest.raises(ValueError, match="request can never fit"):
        paged([(30, 20)], 16, 4, 64)
