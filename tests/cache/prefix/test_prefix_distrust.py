"""What a request stood on that ended in numbers that are not finite is found by nobody, in any group."""

import pytest
from prefix_driver import CHUNK, ENTRIES, FULL, OPEN, STATE, WINDOW, Driver

from kvlab.cache.prefix import DESIGNS

TEXT = list(range(10, 40))


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("pools", ["per_kind", "unified", "sectors"])
@pytest.mark.parametrize("parts", [(FULL,), (WINDOW,), (CHUNK, FULL), (STATE,), (FULL, WINDOW, STATE), (ENTRIES, OPEN)],
                         ids=lambda parts: "+".join(type(p).__name__ for p in parts))  # fmt: skip
def test_all_groups_lose_the_history_whoever_holds_it(design, pools, parts):
    driver = Driver(*parts, design=design, pools=pools, checkpoint_tokens=4)
    bad = [*TEXT, 1, 2, 3]
    driver.run("before", bad)
    driver.start("b", [*TEXT[:20], 90, 91, 92, 93, 94])
    driver.start("a", bad)
    driver.compute("a")
    driver.compute("b", 2)
    del driver.requests["a"]
    driver.manager.free("a", distrust=True)
    driver.manager.forget("a")
    driver.check()
    for column in range(len(driver.prefix.columns)):
        shared = [h for h in driver.histories(column) if list(h) == bad[: len(h)]]
        assert not shared, "a page of the history can be found"
    # who held some of these pages goes on, and what is computed anew is found again
    driver.compute("b")
    driver.end("b")
    assert driver.run("c", bad) == 0
    unit = driver.prefix.unit
    assert driver.run("d", bad) == (len(bad) - 1) // unit * unit


@pytest.mark.parametrize("design", DESIGNS)
def test_a_page_that_two_hold_and_nobody_finds_is_copied_before_it_is_written(design):
    driver = Driver(design=design, num_blocks=20)
    for name, last in (("a", 1), ("b", 2), ("c", 3)):
        driver.start(name, [*TEXT[:12], last])
        driver.compute(name)
    del driver.requests["a"]
    driver.manager.free("a", distrust=True)
    shared = driver.table("c")[:3]
    assert driver.table("b")[:3] == shared
    restart = driver.manager.truncate("b", 10)
    assert [source for _, source, _ in restart.copies] == [shared[2]]
    assert driver.table("b")[2] not in shared and driver.table("c")[:3] == shared
    driver.check()
