"""Tables that follow no position by position rule: a state's one page, and pages of one entry per r tokens."""

import pytest

from kvlab.cache import KVCacheManager
from kvlab.specs.formats import get_format
from kvlab.specs.layout import group_parts
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import Attention, CompressedEntries, RecurrentState, SlidingWindow, StateArray

BF16 = get_format("bf16")
FULL = Attention(2, 8, 8, BF16)
STATE = RecurrentState("mamba2", (StateArray("conv", ((10, 1),), 3, BF16), StateArray("ssm", ((4, 8),), 8, BF16)))


def manager_of(*parts, num_blocks, block_size=4, in_flight=16):
    layers = tuple(LayerSpec(i, (part,)) for i, part in enumerate(parts))
    return KVCacheManager(group_parts(ModelSpec("m", "m", layers, 32, 4, 64), block_size), num_blocks, in_flight)


def tables(manager, request_id):
    return [list(table) for table in manager.tables[request_id]]


def test_a_state_is_one_page_from_the_first_token_to_the_last():
    manager = manager_of(FULL, STATE, STATE, num_blocks=[20, 4])
    assert manager.allocate("a", 1)
    assert tables(manager, "a") == [[1], [1]]
    assert manager.allocate("a", 40) and manager.allocate("b", 3)
    assert tables(manager, "a")[1] == [1] and tables(manager, "b")[1] == [2]
    manager.advance("a", 40)
    assert tables(manager, "a")[1] == [1]
    assert manager.held_bytes == 11 * manager.groups[0].block_bytes + 2 * manager.groups[1].block_bytes
    manager.check_invariants()
    assert manager.free("a") == 11
    # the state page that a gave back is the next that is taken
    assert manager.allocate("c", 1) and tables(manager, "c")[1] == [1]


def test_no_token_of_a_state_or_of_shared_entries_has_a_slot():
    manager = manager_of(FULL, STATE, CompressedEntries(2, 8, BF16), num_blocks=[9, 9, 9])
    manager.allocate("a", 5)
    assert [manager.slot_mapping("a", 3, 5, g) for g in range(3)] == [[7, 8], [-1, -1], [-1, -1]]


def test_a_page_of_entries_is_taken_when_its_first_entry_is_complete():
    # 4 tokens an entry, 8 tokens a page: two entries
    manager = manager_of(CompressedEntries(4, 8, BF16), num_blocks=[9], block_size=8)
    assert manager.groups[0].layouts[0].block_size == 2
    counts = []
    for tokens in range(1, 22):
        assert manager.allocate("a", tokens)
        counts.append(len(manager.block_table("a")))
        manager.advance("a", tokens)
    # entry 0 is complete with the 4th token, entry 2 with the 12th, entry 4 with the 20th; none ever goes
    assert counts == [0] * 3 + [1] * 8 + [2] * 8 + [3] * 2
    assert list(manager.block_table("a")) == [1, 2, 3]


def test_a_page_must_hold_whole_entries():
    with pytest.raises(ValueError, match="block_size 6: must be a multiple of 4"):
        manager_of(CompressedEntries(4, 8, BF16), num_blocks=[9], block_size=6)


def test_a_failed_allocation_in_one_group_leaves_the_others_untouched():
    """sglang#16067: a state was taken, keys and values were not to be had, and the state was never given back."""
    manager = manager_of(FULL, STATE, num_blocks=[3, 5])
    assert not manager.allocate("a", 12)
    assert [pool.num_held for pool in manager.pools] == [0, 0] and "a" not in manager.tables
    # and the other way round: pages are there, the state is not
    short = manager_of(FULL, STATE, num_blocks=[20, 2])
    assert short.allocate("a", 4) and not short.allocate("b", 4)
    assert [pool.num_held for pool in short.pools] == [1, 1]
    short.check_invariants()


def test_admission_counts_states_and_entries():
    manager = manager_of(FULL, STATE, CompressedEntries(4, 8, BF16), num_blocks=[20, 4, 3], block_size=8)
    assert manager.too_long(16) == ""
    assert manager.too_long(28) == "28 tokens take 4 pages of group compressed4, the pool has 3"
    assert manager.allocate("a", 8)
    # a state never grows: one left is enough, whatever is to be spared
    assert manager.has_room(8, spare=1)
    manager.allocate("b", 1)
    assert not manager.has_room(1)
    assert manager.missing("c", 1) == 1


def test_the_table_of_a_state_is_not_counted_in_attention_blocks():
    """vllm#55601: the index of a state was computed with another group's block size."""
    manager = manager_of(FULL, STATE, SlidingWindow(2, 8, 8, BF16, window=3), num_blocks=[40, 4, 40], block_size=1)
    for tokens in (1, 8, 9, 30):
        manager.allocate("a", tokens)
        assert len(manager.block_table("a", 2)) == 1
    assert manager.groups[2].name == "state"
