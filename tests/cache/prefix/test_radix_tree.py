"""What the tree must keep: keys of children, locks by path, its sizes, and no more memory than its tokens."""

import random
import sys

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


def kept_bytes(value):
    """Bytes of memory that `value` keeps alive beyond an empty one; a view keeps all that it looks into."""
    owner = value.obj if isinstance(value, memoryview) else value
    return sys.getsizeof(owner) - sys.getsizeof(owner[:0])


@pytest.mark.parametrize("order", ["from the front", "from the back", "at random"])
def test_a_thousand_splits_keep_no_more_than_twice_the_live_tokens(order):
    """sglang#17191: children that are views keep their parent's memory."""
    driver = Driver(design="radix", block_size=1, num_blocks=1200, checked=False)
    cuts = list(range(1, 21))
    if order == "from the back":
        cuts.reverse()
    if order == "at random":
        random.Random(2).shuffle(cuts)
    for text in range(50):
        driver.run("whole", [text] * 21)
        for n in cuts:
            assert driver.start("part", [text] * n + [99]) == n
            driver.end("part")
    found = [node for node in driver.prefix.index.nodes() if node.units]
    assert len(found) == 50 + 1000
    live = len(driver.histories())
    assert live == 50 * 21
    # a token is four bytes of a key, and four of the page that it has; a key ends in one byte more
    assert sum(kept_bytes(node.key) for node in found) <= 2 * 4 * live
    assert sum(kept_bytes(pages) for node in found for pages in node.pages) <= 2 * 4 * live
    driver.manager.check_invariants()


def test_a_growing_request_stays_one_node():
    driver = Driver(design="radix")
    driver.start("a", list(range(6)))
    driver.compute("a")
    for token in range(40):
        driver.requests["a"].tokens.append(token)
        driver.compute("a")
    assert nodes(driver) == [(0, 0, 1), (0, 11, 1)]
