"""Block tables as a story with exact ids: full attention, windows, chunks, and what must fail."""

import itertools

import pytest

from kvlab.cache import KVCacheManager
from kvlab.specs.formats import get_format
from kvlab.specs.layout import group_parts
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.pages import dead_pages, most_pages
from kvlab.specs.parts import Attention, ChunkedLocal, CrossAttention, Retention, SlidingWindow

BF16 = get_format("bf16")
FULL = Attention(2, 8, 8, BF16)


def manager_of(*parts, num_blocks, block_size=4, in_flight=16, order=None):
    layers = tuple(LayerSpec(i, (part,)) for i, part in enumerate(parts))
    groups = group_parts(ModelSpec("tiny", "llama", layers, 32, 4, 64), block_size)
    return KVCacheManager(groups, num_blocks, in_flight, order)


def table(manager, request_id, group=0):
    return list(manager.block_table(request_id, group))


def test_two_requests_share_a_pool():
    manager = manager_of(FULL, num_blocks=[8])
    assert manager.allocate("a", 5)
    assert manager.allocate("b", 4)
    assert manager.allocate("a", 8)  # fills its second page, takes none
    assert manager.allocate("a", 9)
    assert (table(manager, "a"), table(manager, "b")) == ([1, 2, 4], [3])
    assert manager.slot_mapping("a", 3, 9) == [7, 8, 9, 10, 11, 16]
    assert manager.held_bytes == 4 * manager.groups[0].block_bytes

    # 7 pages, 4 held: b's 17 tokens need 4 more
    assert manager.missing("b", 17) == 1
    assert not manager.allocate("b", 17)
    assert table(manager, "b") == [3]
    assert manager.free("a") == 3
    assert manager.allocate("b", 17)
    assert table(manager, "b") == [3, 1, 2, 4, 5]
    manager.check_invariants()
    assert manager.free("b") == 5
    assert manager.free("b") == 0
    assert manager.num_free == 7


def test_pages_behind_a_window_go_back_when_no_later_query_reads_them():
    manager = manager_of(SlidingWindow(2, 8, 8, BF16, window=8), num_blocks=[6])
    assert manager.allocate("a", 12)
    # the next query, at 10, reads 3..10: token 3 is in page 1
    assert manager.advance("a", 10) == 0
    # at 11 it reads 4..11
    assert manager.advance("a", 11) == 1
    assert table(manager, "a") == [0, 2, 3]
    assert manager.advance("a", 11) == 0
    assert manager.allocate("a", 13)
    assert table(manager, "a") == [0, 2, 3, 1]
    assert manager.slot_mapping("a", 4, 13) == [8, 9, 10, 11, 12, 13, 14, 15, 4]
    with pytest.raises(ValueError, match="positions 3 to 5"):
        manager.slot_mapping("a", 3, 5)
    with pytest.raises(ValueError, match="positions 15 to 17"):
        manager.slot_mapping("a", 15, 17)
    manager.check_invariants()
    assert manager.free("a") == 3


def test_chunks_go_back_when_the_next_one_begins():
    manager = manager_of(ChunkedLocal(2, 8, 8, BF16, chunk=8), num_blocks=[6])
    assert manager.allocate("a", 8)
    assert manager.advance("a", 7) == 0
    assert manager.advance("a", 8) == 2
    assert table(manager, "a") == [0, 0]


def test_full_and_window_groups_have_tables_and_pools_of_their_own():
    manager = manager_of(SlidingWindow(2, 8, 8, BF16, window=4), FULL, num_blocks=[9, 5], in_flight=4)
    assert [group.name for group in manager.groups] == ["full", "sliding4"]
    assert manager.allocate("a", 8)
    manager.advance("a", 8)
    assert (table(manager, "a", 0), table(manager, "a", 1)) == ([1, 2], [0, 2])
    # all or nothing over the groups: 9 more pages are there in neither
    assert not manager.allocate("a", 40)
    assert (table(manager, "a", 0), table(manager, "a", 1)) == ([1, 2], [0, 2])
    manager.check_invariants()


def test_what_can_never_fit_is_said_with_the_numbers():
    manager = manager_of(FULL, num_blocks=[11])
    assert manager.too_long(40) == ""
    assert manager.too_long(41) == "41 tokens take 11 pages of group full, the pool has 10"
    window = manager_of(SlidingWindow(2, 8, 8, BF16, window=8), num_blocks=[6], in_flight=8)
    assert window.too_long(1_000_000) == ""


def test_invariants_see_a_table_that_names_a_page_it_does_not_hold():
    manager = manager_of(FULL, num_blocks=[6])
    manager.allocate("a", 8)
    manager.tables["a"][0].append(1)
    with pytest.raises(AssertionError, match="group full, block 1: 1 references, 2 in tables"):
        manager.check_invariants()


def test_what_an_encoder_keeps_is_not_in_the_engine_yet():
    with pytest.raises(ValueError, match="group encoder: retention 'encoder' is not in the engine yet"):
        manager_of(CrossAttention(2, 8, 8, BF16, encoder_tokens=3), num_blocks=[4])


def live_positions(rule, position):
    """Positions a query at `position` reads, by definition."""
    lower = {"all": 0, "window": position - rule.size + 1, "chunk": position // max(1, rule.size) * rule.size}
    return {p for p in range(position + 1) if p >= lower[rule.rule] or p < rule.sinks}


RULES = [Retention("all"), *(Retention("window", w) for w in (1, 3, 4, 7)), Retention("window", 5, 2),
         Retention("chunk", 4), Retention("chunk", 6)]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_dead_pages_are_those_no_later_query_reads(rule, block_size):
    for computed in range(30):
        read = set().union(*(live_positions(rule, q) for q in range(computed, 40)))
        dead = {i for i in range(40 // block_size) if not read & set(range(i * block_size, (i + 1) * block_size))}
        assert set(dead_pages(rule, block_size, computed)) == dead


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_most_pages_bounds_every_way_to_grow_and_windows_reach_it(rule):
    for block_size, in_flight, tokens in itertools.product((1, 3, 4), (1, 2, 5), (1, 6, 23)):
        most = 0
        for chunk in range(1, in_flight + 1):
            for offset in range(chunk):  # the first step may be shorter
                computed = 0
                while computed < tokens:
                    end = min(tokens, computed + ((offset or chunk) if not computed else chunk))
                    held = -(-end // block_size) - len(dead_pages(rule, block_size, computed))
                    most, computed = max(most, held), end
        bound = most_pages(rule, block_size, tokens, in_flight)
        assert most <= bound <= most + (rule.rule != "all") * (2 + (rule.sinks > 0))
