"""One pool for all groups: a page freed by one kind serves another, and nothing is given out twice."""

import random

import pytest

from kvlab.cache import BlockPool, KVCacheManager
from kvlab.cache.sectors import SectorPages
from kvlab.specs.formats import get_format
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import Attention, RecurrentState, SlidingWindow, StateArray
from kvlab.specs.pools import POOLS, pool_layout
from kvlab.specs.rollback import RollbackPolicy

BF16 = get_format("bf16")
FULL = Attention(2, 16, 16, BF16)
WINDOW = SlidingWindow(2, 16, 16, BF16, window=8)
STATE = RecurrentState("mamba2", (StateArray("ssm", ((4, 8),), 8, BF16),))  # 512 bytes, as pages of 4 tokens


def manager_of(*parts, pools, num_blocks, in_flight=8, rollback=None):
    layers = tuple(LayerSpec(i, (part,)) for i, part in enumerate(parts))
    layout = pool_layout(ModelSpec("m", "m", layers, 32, 4, 64), 4, pools)
    numbers = [num_blocks] * len(layout.buffers)
    return KVCacheManager(layout, numbers, in_flight, rollback=rollback or RollbackPolicy())


def tables(manager, request_id):
    return [list(table) for table in manager.tables[request_id]]


def test_unified_groups_take_turns_from_one_list():
    manager = manager_of(FULL, WINDOW, STATE, pools="unified", num_blocks=9)
    assert manager.allocate("a", 8)
    assert tables(manager, "a") == [[1, 2], [3, 4], [5]]
    assert manager.num_free == 3
    manager.check_invariants()
    # the window's first page goes back, and becomes a page of full attention
    assert manager.allocate("a", 12)
    manager.advance("a", 11)
    assert tables(manager, "a") == [[1, 2, 6], [0, 4, 7], [5]]
    assert manager.allocate("a", 13)
    assert tables(manager, "a") == [[1, 2, 6, 3], [0, 4, 7, 8], [5]]
    assert manager.num_free == 0
    assert manager.missing("a", 17) == 2
    assert not manager.allocate("b", 1)
    manager.check_invariants()
    assert manager.free("a") == 8


def test_unified_says_what_can_never_fit_over_all_groups():
    manager = manager_of(FULL, WINDOW, STATE, pools="unified", num_blocks=9)
    # 4 + 4 pages of 16 tokens, and a state
    assert manager.too_long(16) == "16 tokens take 9 pages over all groups, the pool has 8"
    assert manager.too_long(12) == ""
    assert manager.has_room(12) and not manager.has_room(12, spare=1)


def test_a_sector_belongs_to_one_kind_until_its_last_page_is_free():
    # two full layers and a window: 1,024 and 512 bytes, so a sector is 1 page of full, or 2 of the window
    manager = manager_of(FULL, FULL, WINDOW, pools="sectors", num_blocks=6)
    assert manager.layout.pages_per_unit == (1, 2)
    assert manager.allocate("a", 4)
    assert tables(manager, "a") == [[1], [4]]  # sector 1, and the first page of sector 2
    assert manager.pools[1].num_open == 1
    assert manager.allocate("b", 4)
    # the window's page is the other half of sector 2
    assert tables(manager, "b") == [[3], [5]]
    assert manager.held_bytes == 3 * 1024 and manager.num_free == 2
    manager.free("a")
    # sector 1 is free, sector 2 still has b's page
    assert manager.num_free == 3 and manager.pools[1].num_open == 1
    manager.check_invariants()
    manager.free("b")
    assert manager.num_free == 5
    # and now sector 2 may serve full attention
    assert manager.allocate("c", 12)
    assert tables(manager, "c")[0] == [2, 3, 1]
    manager.check_invariants()


def test_the_rest_of_a_held_sector_counts_for_its_own_kind_only():
    manager = manager_of(FULL, FULL, WINDOW, pools="sectors", num_blocks=4)
    manager.allocate("a", 4)
    # one sector and half of another are left: a page of full and a page of the window fit
    assert manager.missing("b", 4) == 0
    # two of full take two sectors, and two of the window the open half and one sector more
    assert manager.missing("b", 8) == 2
    assert manager.too_long(13) == "13 tokens take 6 sectors over all groups, the pool has 3"


def test_one_sequence_alone_takes_no_more_sectors_than_its_pages_fill():
    manager = manager_of(FULL, FULL, WINDOW, pools="sectors", num_blocks=12)
    most = manager.layout.units(manager.layout.sequence_pages(30, 5))[0]
    computed = peak = 0
    while computed < 30:
        assert manager.allocate("a", min(30, computed + 5))
        peak = max(peak, manager.unit_pools[0].num_held)
        computed = min(30, computed + 5)
        manager.advance("a", computed)
    assert peak == most == 8 + 2


def test_sectors_hand_out_and_take_back_pages_one_by_one():
    units = BlockPool(4)
    pages, others = SectorPages(units, 3), SectorPages(units, 2)
    assert pages.allocate(4) == [3, 4, 5, 6]
    assert (pages.num_open, pages.num_free, others.num_free) == (2, 5, 2)
    assert others.allocate(1) == [6]
    with pytest.raises(ValueError, match="count 3: only 2 pages are free"):
        pages.allocate(3)
    pages.free([3, 0, 5])
    assert list(pages.free_blocks()) == [7, 8, 3, 5]
    pages.free([6])
    assert units.num_free == 1 and list(pages.free_blocks()) == [3, 5]
    with pytest.raises(AssertionError, match="page 3 is freed more often than it was taken"):
        pages.free([3])
    for pool in (pages, others):
        pool.check_invariants()
    others.free([6])
    pages.free([4])
    assert units.num_free == 3


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("seed", range(6))
def test_random_requests_keep_every_invariant(pools, seed):
    """Growth, windows that slide, kept states, steps back and departures, checked after every one."""
    rng = random.Random(seed)
    rollback = RollbackPolicy(*rng.choice([(0, 0), (0, 4), (3, 4)]), rng.random() < 0.5)
    manager = manager_of(
        FULL, FULL, WINDOW, STATE, WINDOW, pools=pools, num_blocks=rng.randint(12, 30), rollback=rollback
    )
    live: dict[str, int] = {}
    for step in range(150):
        name = rng.choice([*live, f"r{step}"])
        done = live.get(name, 0)
        if name in live and rng.random() < 0.15:
            manager.free(name)
            del live[name]
        elif name in live and done and rng.random() < 0.15:
            try:
                live[name] = manager.truncate(name, rng.randint(max(0, done - 4), done)).computed
            except ValueError:
                assert manager.computed[name] == done
        else:
            tokens = done + rng.randint(1, 6)
            missing = manager.missing(name, tokens, keep_state := rollback.at(tokens, 5))
            assert manager.allocate(name, tokens, keep_state) == (not missing)
            if not missing:
                manager.advance(name, tokens)
                live[name] = tokens
        manager.check_invariants()
    for name in live:
        manager.free(name)
    assert manager.held_bytes == 0
    manager.check_invariants()
