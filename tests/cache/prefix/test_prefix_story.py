"""Prefix caching step by step, with exact page ids, in both designs."""

from itertools import pairwise

import pytest
from prefix_driver import BF16, FULL, STATE, WINDOW, Driver

from kvlab.cache import PrefixOptions
from kvlab.cache.prefix import DESIGNS, EVICTIONS
from kvlab.specs.parts import CompressedEntries
from kvlab.specs.rollback import RollbackPolicy

TEXT = list(range(10, 22))  # three pages of four


@pytest.fixture(params=DESIGNS)
def design(request):
    return request.param


def test_a_second_request_starts_on_the_first_ones_pages(design):
    driver = Driver(design=design, num_blocks=9)
    assert driver.start("a", [*TEXT, 1, 2]) == 0
    driver.compute("a")
    assert driver.table("a") == [1, 2, 3, 4]
    # b parts from a inside the third page
    assert driver.start("b", [*TEXT[:10], 99, 98, 97]) == 8
    driver.compute("b")
    assert driver.table("b") == [1, 2, 5, 6]
    assert list(driver.manager.pools[0].references[1:7]) == [2, 2, 1, 1, 1, 1]
    driver.end("a")
    # what a alone held: its full page is idle, its half page is free
    assert driver.manager.pools[0].num_idle == 1 and driver.manager.num_free == 3
    driver.end("b")
    assert sorted(driver.prefix.cached_pages()) == [(0, 1), (0, 2), (0, 3), (0, 5)]
    # the end of the sequence unused for longest goes first, what both began with last
    assert list(driver.prefix.cached_pages()) == [(0, 3), (0, 5), (0, 2), (0, 1)]


def test_two_that_compute_the_same_in_one_step_end_up_on_the_first_ones_pages(design):
    driver = Driver(design=design, num_blocks=9)
    driver.start("a", TEXT)
    driver.start("b", TEXT)
    assert driver.manager.allocate("a", 12) and driver.manager.allocate("b", 12)
    assert (driver.table("a"), driver.table("b")) == ([1, 2, 3], [4, 5, 6])
    driver.manager.advance("a", 12)
    driver.manager.advance("b", 12)
    assert driver.table("b") == [1, 2, 3] and driver.manager.num_free == 5
    assert driver.prefix.counters.adopted == 3 and driver.prefix.counters.hits == 0
    driver.manager.check_invariants()


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_the_last_token_is_always_computed(design, extra):
    """vllm#11186: a prompt that is all there still needs the logits of its last token, and its chain goes on."""
    driver = Driver(design=design)
    text = list(range(12 + extra))
    assert driver.run("a", text) == 0
    assert driver.start("b", text) == (len(text) - 1) // 4 * 4 < len(text)
    driver.compute("b")
    driver.requests["b"].tokens.extend(range(50, 60))
    driver.compute("b")
    driver.end("b")
    assert driver.run("c", [*text, *range(50, 60), 1]) == (len(text) + 10) // 4 * 4


def test_what_was_evicted_leaves_no_hit_behind_it(design):
    """llm-d-inference-sim#705: with the first page gone, nothing behind it is a hit, and none is counted."""
    driver = Driver(design=design, num_blocks=4)
    driver.run("a", TEXT)
    driver.prefix.index.drop([1])
    driver.manager.pools[0].on_busy([1])
    driver.manager.pools[0].uncache([1])
    assert driver.start("b", [*TEXT, 7][:12]) == 0
    assert driver.prefix.counters.hits == 0


def test_a_prefix_is_counted_once_whatever_the_chunks(design):
    """sglang#2555, #26976: three chunks without reuse are no hits; a preempted request that returns counts apart."""
    driver = Driver(design=design)
    driver.start("a", TEXT)
    for _ in range(3):
        driver.compute("a", 4)
    counters = driver.prefix.counters
    assert (counters.requests, counters.queries, counters.hits) == (1, 12, 0)
    driver.manager.free("a")  # preempted
    assert driver.start("a", TEXT) == 8
    assert (counters.requests, counters.queries, counters.hits) == (1, 12, 0)
    assert (counters.again_queries, counters.again_hits) == (12, 8)
    driver.compute("a")
    driver.end("a")
    assert driver.run("b", TEXT) == 8
    assert (counters.requests, counters.queries, counters.hits, counters.hit_rate) == (2, 24, 8, 8 / 24)


def test_a_hit_that_nobody_holds_takes_up_room(design):
    """Touching an idle page makes it held: counting it as free and as a hit would admit too much."""
    driver = Driver(design=design, num_blocks=7)
    driver.run("a", TEXT)
    driver.start("b", list(range(50, 62)))
    driver.compute("b")
    assert driver.manager.num_free == 0 and driver.manager.pools[0].num_idle == 3
    # 8 tokens are there; four pages are wanted and three can be had
    assert driver.start("c", [*TEXT, 1]) is None
    assert driver.start("c", [*TEXT[:8], 1]) == 8
    driver.compute("c")
    assert driver.table("c")[:2] == [1, 2]
    assert driver.prefix.counters.evicted == 1


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_who_goes_first(design, eviction):
    """Two prompts of one page each; the older one was hit twice, is less urgent, and was used last."""
    driver = Driver(design=design, num_blocks=4, eviction=eviction, ttl=10)
    old, new = [1, 2, 3, 4, 5], [6, 7, 8, 9, 5]
    driver.run("a", old[:4], priority=3)
    driver.run("b", new[:4], priority=1)
    for name in "cd":
        assert driver.run(name, old, priority=3) == 4
    assert driver.prefix.evict(0) == 1
    (left,) = driver.histories()
    gone = {"lru": new, "lfu": new, "ttl": new, "fifo": old, "priority": old}[eviction]
    assert left != tuple(gone[:4])


def test_what_nobody_used_for_too_long_goes_by_itself(design):
    driver = Driver(design=design, eviction="ttl", ttl=10)
    driver.manager.tick(100.0)
    driver.run("a", TEXT)
    assert driver.manager.tick(105.0) == 0
    assert driver.run("b", TEXT[:5]) == 4
    assert driver.manager.tick(112.0) == 2  # the first page was used since
    assert driver.histories() == {tuple(TEXT[:4])}
    assert driver.manager.tick(115.0) == 1 and not driver.histories()


def test_a_window_needs_its_last_pages_alone(design):
    """vllm#17398: a window of 7 reads 6 older tokens, two pages of 4; one page, unless it is the first, is no hit."""
    driver = Driver(WINDOW, design=design, num_blocks=20)
    text = list(range(30))
    driver.start("a", text)
    driver.compute("a")
    assert driver.table("a") == [0, 0, 0, 0, 0, 0, 7, 8]
    driver.end("a")
    driver.start("b", [*text, 1])
    assert driver.table("b") == [0, 0, 0, 0, 0, 6, 7]  # tokens 22 to 27
    driver.end("b")
    # without the page of tokens 20 to 23 no run of two pages ends behind it, up to 20
    item = 6
    driver.prefix.orders[0].remove([item])
    driver.prefix._drop([item], driver.prefix.orders[0])
    driver.manager.check_invariants()
    assert driver.start("c", [*text, 1]) == 20
    assert driver.table("c") == [0, 0, 0, 4, 5]


def test_groups_agree_on_the_longest_length_that_all_have(design):
    driver = Driver(FULL, WINDOW, design=design, num_blocks=30)
    text = list(range(30))
    driver.run("a", text)
    base = driver.prefix.columns[1].base
    for page in (7, 6):  # the window's pages of tokens 20 to 27
        driver.prefix.orders[1].remove([base + page])
        driver.prefix._drop([base + page], driver.prefix.orders[1])
    hit = driver.manager.match(_request("b", [*text, 1]))
    assert driver.prefix.by_group(hit) == {"full": 28, "sliding7": 20}
    assert hit.tokens == 20 and list(hit.tables[1]) == [0, 0, 0, 4, 5]


def test_a_state_is_found_at_the_prompt_s_end_and_where_two_prompts_part(design):
    driver = Driver(FULL, STATE, design=design, num_blocks=60)
    shared = list(range(18))
    assert driver.run("a", [*shared, 50, 51, 52, 53, 54]) == 0  # its state is kept after 20 of 23 tokens
    assert driver.run("b", [*shared, 60, 61, 62]) == 0  # 16 tokens are known, no state of that length is
    assert driver.run("c", [*shared, 70, 71, 72]) == 16  # b left one where it parted from a
    assert driver.run("d", [*shared, 50, 51, 52, 53, 99]) == 20
    hit = driver.manager.match(_request("e", [*shared, 60, 61, 62]))
    assert driver.prefix.by_group(hit) == {"full": 20, "state": 20}


def test_states_alone_are_shared_too_and_kept_lengths_are_a_setting(design):
    driver = Driver(STATE, design=design, checkpoint_prompt=False, junctions=False, checkpoint_tokens=6)
    assert driver.run("a", list(range(21))) == 0
    assert driver.run("b", list(range(20))) == 16  # 6 is rounded up to a page: states after 8 and 16
    assert driver.run("c", list(range(15))) == 8


def test_a_state_moves_when_there_is_no_room_to_copy_it(design):
    """One place beside the kept state, and another request in it: the state itself becomes the request's."""
    driver = Driver(STATE, design=design, num_blocks=3)
    driver.run("a", [1, 2, 3, 4, 5])
    assert driver.manager.pools[0].num_idle == 1
    driver.start("x", [9])
    driver.compute("x")
    ((_, kept),) = driver.prefix.cached_pages()
    assert driver.start("b", [1, 2, 3, 4, 6]) == 4
    assert driver.manager.take_copies() == []
    assert driver.table("b") == [kept] and driver.manager.pools[0].num_idle == 0


def test_a_state_is_copied_where_there_is_room(design):
    driver = Driver(FULL, STATE, design=design, num_blocks=9)
    driver.run("a", [1, 2, 3, 4, 5])
    assert driver.start("b", [1, 2, 3, 4, 6]) == 4
    ((group, source, destination),) = driver.manager.take_copies()
    assert (group, destination) == (1, driver.table("b", 1)[0]) and source != destination
    driver.manager.check_invariants()


def test_stepping_back_into_a_shared_page_writes_into_a_copy(design):
    driver = Driver(design=design, num_blocks=9)
    driver.start("a", TEXT)
    driver.compute("a")
    restart = driver.manager.truncate("a", 10)
    assert (restart.computed, restart.copies) == (10, ((0, 3, 4),))
    assert driver.table("a") == [1, 2, 4]
    assert driver.histories() == {tuple(TEXT[:n]) for n in (4, 8, 12)}
    del driver.requests["a"].tokens[10:]
    driver.requests["a"].tokens.extend([70, 71, 72])
    driver.requests["a"].num_computed = 10
    driver.compute("a")
    driver.end("a")
    assert driver.histories() == {tuple(TEXT[:n]) for n in (4, 8, 12)} | {(*TEXT[:10], 70, 71)}


def test_a_promised_step_back_behind_a_hit_starts_over(design):
    driver = Driver(WINDOW, STATE, design=design, num_blocks=40, rollback=RollbackPolicy(6, 4))
    driver.run("a", list(range(30)))
    driver.start("b", [*range(30), 1])
    driver.compute("b")
    assert driver.manager.truncate("b", 26).computed == 0
    assert "b" not in driver.manager.tables
    driver.manager.check_invariants()


def test_a_stale_hit_is_looked_up_again(design):
    """vllm#39702: between look-up and use the pages may go."""
    driver = Driver(design=design, num_blocks=9)
    driver.run("a", TEXT)
    hit = driver.manager.match(_request("b", TEXT))
    driver.prefix.clear()
    with pytest.raises(ValueError, match="match again"):
        driver.manager.allocate("b", hit.tokens, hit=hit)
    hit = driver.manager.match(_request("b", TEXT))
    driver.run("c", [5, 6, 7, 8])
    assert hit.tokens == 0 and driver.manager.allocate("b", 0, hit=hit)


def test_the_null_page_is_never_cached_and_no_page_is_freed_twice(design):
    """vllm#42571: a page listed twice with one reference is an error where it happens."""
    driver = Driver(WINDOW, design=design)
    driver.run("a", list(range(40)))
    pool = driver.manager.pools[0]
    assert not pool.cached[0]
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free([next(page for _, page in driver.prefix.cached_pages())])
    (one,) = pool.allocate(1)
    pool.touch([one])
    before = pool.num_free
    pool.free([one, one])
    assert pool.num_free == before + 1
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free([one])


def test_tokens_are_tokens_whatever_the_pages(design):
    """vllm-ascend#11383: hit tokens do not depend on how groups cut pages (compressed entries, several sizes)."""
    from prefix_driver import ENTRIES

    texts = [list(range(40)), [*range(40), 1], [*range(16), 1, 2]]
    full = [Driver(FULL, design=design).run(str(len(t)), t) for t in texts[:1]]
    for parts in ((FULL,), (FULL, ENTRIES), (ENTRIES,)):
        driver = Driver(*parts, design=design)
        hits = [driver.run(str(i), text) for i, text in enumerate(texts)]
        assert hits == [0, 40, 16] and full == [0]


@pytest.mark.parametrize(("pools", "sizes", "unit"), [
    ("per_kind", (12, 12, 12), 12), ("sectors", (12, 36, 12), 36), ("unified", (12, 36, 192), 576),
])  # fmt: skip
def test_a_hit_ends_where_the_pages_of_all_groups_end(design, pools, sizes, unit):
    """Compressed entries under shared pools: pages of one size hold unlike numbers of tokens, and a text of less than
    their least common multiple is no hit, under sectors either."""
    parts = (FULL, CompressedEntries(4, 72, BF16), CompressedEntries(6, 24, BF16))
    driver = Driver(*parts, design=design, pools=pools, block_size=12, in_flight=1000)
    assert tuple(group.block_size for group in driver.manager.groups) == sizes and driver.prefix.unit == unit
    text = list(range(unit + 1))
    assert [driver.run(str(n), text[:n]) for n in (unit + 1, unit, unit + 1)] == [0, 0, unit]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [("design", "tree", "hash, radix"), ("eviction", "random", "lru"), ("ttl", 0, "positive"),
     ("checkpoint_tokens", -1, "0 or positive")],
)  # fmt: skip
def test_options_out_of_range(field, value, reason):
    with pytest.raises(ValueError, match=f"{field}.*{reason}"):
        PrefixOptions(**{field: value})


def _request(name, tokens, **fields):
    from kvlab.schedule import Request, SamplingParams

    return Request(name, tokens, SamplingParams(), **fields)


@pytest.mark.parametrize("design", DESIGNS)
def test_entries_come_in_the_order_in_which_they_were_made(design):
    """The step-through shows them so: in a browser and here they must be the same."""
    driver = Driver(design=design, num_blocks=64)
    histories = []
    for i in range(20):
        driver.run(f"r{i}", [100 + i] * 4 + [7])
        histories.append([history for _, history, _ in driver.prefix.index.entries()])
    assert all(after[: len(before)] == before for before, after in pairwise(histories))
    assert len(histories[-1]) == 20
