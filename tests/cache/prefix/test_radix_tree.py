"""What the tree must keep: keys of children, locks by path, its sizes, and no more memory than its tokens."""

import random

import pytest
from prefix_driver import Driver


def nodes(driver):
    return [(node.start, node.units, node.locks) for node in driver.prefix.index.nodes()]


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("block_size", [1, 4])
def test_children_lie_under_their_own_first_unit_after_every_split(block_size, seed):
    """sglang#36696: a split node stayed under a key that was no longer its own. `check` asserts it after each step."""
    rng, driver = random.Random(3 + seed), Driver(design="radix", block_size=block_size, num_blocks=2000)
    for i in range(40):
        driver.run(str(i), [rng.randrange(2) for _ in range(rng.randint(1, 20))])
    assert len(nodes(driver)) > 10


def test_a_partial_match_locks_no_more_than_it_matched():
    """bytedance-iaas/sglang#508: without a split the whole node stayed locked for ever."""
    driver = Driver(design="radix")
    driver.run("a", list(range(16)))
    assert nodes(driver) == [(0, 0, 0), (0, 4, 0)]
    assert driver.start("b", [*range(8), 50, 51, 52]) == 8
    assert nodes(driver) == [(0, 0, 1), (0, 2, 1), (2, 2, 0)]
    assert (driver.prefix.index.protected, driver.prefix.index.evictable) == (2, 2)
    driver.compute("b")
    driver.run("c", [*range(8), 50, 51, 52, 53, 54])
    driver.end("b")
    assert (driver.prefix.index.protected, driver.prefix.index.evictable) == (0, 5)
    assert driver.prefix.clear() == 5 and driver.manager.num_free == 199


def test_evictable_and_protected_are_all_pages_when_a_prefix_is_put_in_again():
    """sglang#35270: a shared page was counted twice. Pages of 32 tokens; `check` compares after each step."""
    driver = Driver(design="radix", block_size=32)
    text = list(range(100))
    for name in "abc":
        driver.start(name, text)
    for name in "abc":
        driver.compute(name)
    index = driver.prefix.index
    assert (index.protected, index.evictable, driver.prefix.counters.adopted) == (3, 0, 6)
    assert driver.manager.unit_pools[0].num_held == 3 + 3
    for name in "abc":
        driver.end(name)
    assert (index.protected, index.evictable) == (0, 3)


def test_inner_nodes_stay_while_something_is_behind_them():
    driver = Driver(design="radix", num_blocks=12)
    driver.run("a", list(range(9)))
    driver.run("b", [*range(8), 30, 31, 32, 33, 34])
    driver.run("c", [*range(8), 40, 41, 42, 43, 44])
    driver.prefix.evict(0, 2)
    assert driver.histories() == {tuple(range(4)), tuple(range(8))}


def test_a_split_keeps_no_view_of_what_it_split():
    """sglang#17191: children that are views keep their parent's memory. Here: bytes of keys after 299 splits."""
    driver = Driver(design="radix", block_size=1, num_blocks=400, checked=False)
    driver.run("a", [0] * 300)
    for n in range(1, 300):
        driver.start(str(n), [0] * n + [1])
        driver.end(str(n))
    found = list(driver.prefix.index.nodes())
    assert len(found) == 301
    assert sum(len(node.key) for node in found) == 4 * 300
    assert all(type(node.key) is bytearray for node in found)
    driver.manager.check_invariants()


def test_a_growing_request_stays_one_node():
    driver = Driver(design="radix")
    driver.start("a", list(range(6)))
    driver.compute("a")
    for token in range(40):
        driver.requests["a"].tokens.append(token)
        driver.compute("a")
    assert nodes(driver) == [(0, 0, 1), (0, 11, 1)]
