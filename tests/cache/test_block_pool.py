"""The block pool as a story: which ids come out, in which order, and what must fail."""

import random

import pytest

from kvlab.cache import BlockPool


def test_ids_come_out_in_order_and_return_in_the_same_order():
    pool = BlockPool(8)
    assert list(pool.free_blocks()) == [1, 2, 3, 4, 5, 6, 7]
    first = pool.allocate(3)
    second = pool.allocate(2)
    assert (first, second, pool.num_free, pool.num_held) == ([1, 2, 3], [4, 5], 2, 5)

    # freed from its end, so the first block is the next to be handed out again
    pool.free(first)
    assert list(pool.free_blocks()) == [1, 2, 3, 6, 7]
    pool.free(second)
    assert list(pool.free_blocks()) == [4, 5, 1, 2, 3, 6, 7]
    assert pool.allocate(6) == [4, 5, 1, 2, 3, 6]
    pool.check_invariants()


def test_a_shared_block_stays_until_its_last_holder_leaves():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.touch([2])
    pool.free(blocks)
    assert list(pool.free_blocks()) == [1, 3]
    pool.free([2])
    assert list(pool.free_blocks()) == [2, 1, 3]


def test_nobody_can_touch_a_free_block():
    pool = BlockPool(6)
    with pytest.raises(AssertionError, match="block 3 is free"):
        pool.touch([3])
    assert (list(pool.free_blocks()), pool.references[3]) == ([1, 2, 3, 4, 5], 0)
    pool.check_invariants()


def test_one_release_list_may_name_a_block_twice_only_when_it_is_held_twice():
    pool = BlockPool(4)
    [block] = pool.allocate(1)
    pool.touch([block])
    pool.free([block, block])
    assert list(pool.free_blocks()) == [1, 2, 3]
    [block] = pool.allocate(1)
    with pytest.raises(AssertionError, match="block 1 is freed more often"):
        pool.free([block, block])


def test_the_null_block_is_skipped_and_never_handed_out():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.free([0, *blocks, 0])
    assert list(pool.free_blocks()) == [1, 2]


def test_a_full_pool_gives_nothing_rather_than_part():
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(ValueError, match="count 2: only 1 blocks are free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_order_must_be_a_permutation():
    assert BlockPool(5, [4, 2, 1, 3]).allocate(3) == [4, 2, 1]
    with pytest.raises(ValueError, match="every block id from 1 to 4 once"):
        BlockPool(5, [1, 2, 3, 3])
    with pytest.raises(ValueError, match="num_blocks 1"):
        BlockPool(1)


def test_listener_hears_of_every_block_that_became_free_once():
    pool, heard = BlockPool(5), []
    pool.on_free = heard.extend
    a, b = pool.allocate(2), pool.allocate(1)
    pool.touch(a)
    pool.free(a)
    assert heard == []
    pool.free([*a, *b])
    assert heard == [3, 2, 1]


def test_invariants_see_a_broken_count():
    pool = BlockPool(5)
    pool.allocate(2)
    pool.references[1] = 0
    with pytest.raises(AssertionError, match="block 1"):
        pool.check_invariants()


@pytest.mark.parametrize("seed", range(5))
def test_random_use_agrees_with_counting(seed):
    rng, pool, holders = random.Random(seed), BlockPool(23), []
    for _ in range(400):
        match rng.randrange(3):
            case 0 if pool.num_free:
                holders.append(pool.allocate(rng.randint(1, pool.num_free)))
            case 1 if holders:
                shared = rng.choice(holders)
                pool.touch(shared)
                holders.append(list(shared))
            case 2 if holders:
                pool.free(holders.pop(rng.randrange(len(holders))))
        pool.check_invariants()
        assert pool.num_held == len({block for blocks in holders for block in blocks})
