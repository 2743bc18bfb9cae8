"""Stepping back: exact where entries can be forgotten, by a kept state where they cannot, an error everywhere else."""

import random

import pytest

from kvlab.cache import KVCacheManager, Restart
from kvlab.specs.formats import get_format
from kvlab.specs.layout import group_parts
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.pages import dead_pages, table_pages
from kvlab.specs.parts import (
    Attention,
    ChunkedLocal,
    CompressedEntries,
    MLALatent,
    OpenBuffer,
    RecurrentState,
    SlidingWindow,
    StateArray,
)
from kvlab.specs.rollback import RollbackPolicy

BF16 = get_format("bf16")
ARRAY = (StateArray("x", ((10, 1),), 3, BF16),)
FULL, WINDOW = Attention(2, 8, 8, BF16), SlidingWindow(2, 8, 8, BF16, window=8)
STATE = RecurrentState("mamba2", ARRAY)


def manager_of(*parts, num_blocks=40, block_size=4, rollback=RollbackPolicy()):  # noqa: B008
    layers = tuple(LayerSpec(i, part if isinstance(part, tuple) else (part,)) for i, part in enumerate(parts))
    groups = group_parts(ModelSpec("m", "m", layers, 32, 4, 64), block_size)
    return KVCacheManager(groups, [num_blocks] * len(groups), 16, rollback=rollback)


def grow(manager, tokens, name="a", chunk=1):
    """Computes the request up to `tokens` tokens, keeping states as the policy says."""
    done = manager.computed.get(name, 0)
    while done < tokens:
        done = min(tokens, done + chunk, manager.rollback.next_after(done, 10**9) or tokens)
        assert manager.allocate(name, done, manager.rollback.at(done, 10**9))
        manager.advance(name, done)


def tables(manager, name="a"):
    return [list(table) for table in manager.tables[name]]


def test_full_attention_forgets_its_last_pages():
    manager = manager_of(FULL, MLALatent(8, 8, BF16))
    grow(manager, 18)
    assert manager.truncate("a", 9) == Restart(9)
    assert tables(manager) == [[1, 2, 3]]
    # the freed pages are taken again in their order
    grow(manager, 14)
    assert tables(manager) == [[1, 2, 3, 4]]
    with pytest.raises(ValueError, match="tokens 15: must be from 0 to the 14 that request a has"):
        manager.truncate("a", 15)
    assert manager.truncate("a", 0) == Restart(0)
    assert tables(manager) == [[]]
    manager.check_invariants()


def test_a_window_steps_back_as_far_as_its_pages_are_held():
    manager = manager_of(WINDOW)
    grow(manager, 14)
    # the query at 14 reads 7 on: the page of 0..3 is gone, that of 4..7 is not, so a query at 11 finds 4 on
    assert tables(manager) == [[0, 2, 3, 1]]
    with pytest.raises(ValueError, match="tokens 10: group sliding8 gave back its pages of the first 4 tokens"):
        manager.truncate("a", 10)
    assert tables(manager) == [[0, 2, 3, 1]]
    assert manager.truncate("a", 11) == Restart(11)
    assert tables(manager) == [[0, 2, 3]]
    grow(manager, 16)
    assert tables(manager) == [[0, 0, 3, 1]]
    manager.check_invariants()


def test_a_chunk_steps_back_to_its_first_token_and_not_into_the_one_before():
    manager = manager_of(ChunkedLocal(2, 8, 8, BF16, chunk=8))
    grow(manager, 11)
    assert manager.truncate("a", 8) == Restart(8)
    with pytest.raises(ValueError, match="tokens 7: group chunked8 gave back its pages of the first 8 tokens"):
        manager.truncate("a", 7)


def test_entries_step_back_and_their_open_window_only_within_itself():
    buffer = OpenBuffer(ARRAY, ratio=4)
    manager = manager_of((CompressedEntries(4, 8, BF16), buffer))
    grow(manager, 15)
    assert tables(manager) == [[1, 2, 3], [1]]
    assert manager.truncate("a", 13) == Restart(13)
    assert manager.truncate("a", 12) == Restart(12)
    # token 11 closed a window: what its buffer held is overwritten
    with pytest.raises(ValueError, match="tokens 11: group state has seen 12 tokens, and no copy of it after 11"):
        manager.truncate("a", 11)
    # entries alone forget exactly
    alone = manager_of(CompressedEntries(4, 8, BF16))
    grow(alone, 15)
    assert alone.truncate("a", 11) == Restart(11)
    assert tables(alone) == [[1, 2]]


def test_a_state_refuses_without_a_copy():
    """mlx-lm#1109: going back was silently no step at all, and rejected tokens stayed in the state."""
    manager = manager_of(FULL, STATE)
    grow(manager, 9)
    before = tables(manager)
    with pytest.raises(ValueError, match="tokens 8: group state has seen 9 tokens, and no copy of it after 8 or fewer"):
        manager.truncate("a", 8)
    assert tables(manager) == before and manager.computed["a"] == 9
    assert manager.truncate("a", 9) == Restart(9)


def test_a_state_goes_back_to_its_newest_copy_and_says_what_to_compute_again():
    manager = manager_of(FULL, STATE, rollback=RollbackPolicy(checkpoint_tokens=4))
    grow(manager, 9, chunk=3)
    assert manager.kept.lengths("a") == [4, 8]
    assert tables(manager) == [[1, 2, 3], [1]]
    # the state's own page is 1, the copies of lengths 4 and 8 are 2 and 3
    assert manager.truncate("a", 8) == Restart(8, ((1, 3, 1),))
    assert manager.truncate("a", 7) == Restart(4, ((1, 2, 1),))
    assert manager.kept.lengths("a") == [4]
    assert tables(manager) == [[1], [1]]
    # nothing of the sequence is left but its beginning, which needs no copy
    assert manager.truncate("a", 3) == Restart(0)
    manager.check_invariants()
    assert manager.free("a") == 0 and manager.held_bytes == 0


def test_two_steps_back_in_a_row():
    """llama.cpp#22746: the second one restored a snapshot that the first had shifted."""
    manager = manager_of(FULL, STATE, rollback=RollbackPolicy(checkpoint_tokens=2))
    grow(manager, 11)
    assert manager.truncate("a", 8) == Restart(8, ((1, manager_copy(manager, 8), 1),))
    grow(manager, 9)
    assert manager.truncate("a", 7) == Restart(6, ((1, manager_copy(manager, 6), 1),))
    assert manager.kept.lengths("a") == [2, 4, 6]
    grow(manager, 8)
    assert manager.kept.lengths("a") == [2, 4, 6, 8]
    manager.check_invariants()


def manager_copy(manager, length):
    """The page of the state kept after `length` tokens."""
    return {n: pages[0] for n, pages in manager.kept._kept["a"]}[length]


def test_copies_are_bounded_and_counted_at_admission():
    policy = RollbackPolicy(checkpoint_tokens=4, checkpoints_kept=2)
    manager = manager_of(FULL, STATE, num_blocks=10, rollback=policy)
    grow(manager, 20)
    assert manager.kept.lengths("a") == [16, 20]
    assert manager.pools[1].num_held == 3
    assert manager.too_long(36) == ""
    small = manager_of(FULL, STATE, num_blocks=3, rollback=RollbackPolicy(checkpoint_tokens=4))
    assert small.too_long(8) == "8 tokens take 3 pages of group state, the pool has 2"


def test_a_copy_that_has_no_page_fails_the_whole_allocation():
    manager = manager_of(FULL, STATE, num_blocks=3, rollback=RollbackPolicy(checkpoint_tokens=4))
    assert manager.allocate("a", 4, keep_state=True) and manager.allocate("a", 7)
    assert not manager.allocate("a", 8, keep_state=True)
    assert manager.kept.lengths("a") == [4] and tables(manager) == [[1, 2], [1]]
    manager.check_invariants()


def test_a_copy_makes_no_room_for_the_next_while_it_is_read_on_its_way_down():
    """The oldest of two states goes back when a third is kept, but its page is not free: a copy to the tier below holds
    it, and nobody is promised that page."""
    policy = RollbackPolicy(checkpoint_tokens=4, checkpoints_kept=2)
    manager = manager_of(FULL, STATE, num_blocks=4, block_size=16, rollback=policy)
    for length in (4, 8):
        assert manager.allocate("a", length, True)
        manager.advance("a", length)
    [state] = manager.kept.pools
    page = next(manager.kept.pages("a"))
    assert page[0] == state and manager.pools[state].num_free == 0
    manager.pins.pin([page])
    assert manager.missing("a", 12, True) == 1 and not manager.allocate("a", 12, True)
    assert manager.kept.lengths("a") == [4, 8]
    manager.check_invariants()
    manager.pins.unpin([page])
    assert manager.allocate("a", 12, True) and manager.kept.lengths("a") == [8, 12]
    manager.check_invariants()


@pytest.mark.parametrize("every", [1, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_a_promised_step_back_is_always_possible(every, seed):
    """Windows, chunks and states together, from any length, any step up to the promise, again and again."""
    rng = random.Random(seed)
    policy = RollbackPolicy(5, every, checkpoints_kept=-(-5 // every) + 1)
    manager = manager_of(FULL, WINDOW, (STATE, ChunkedLocal(2, 8, 8, BF16, chunk=8)), num_blocks=200, block_size=3,
                         rollback=policy)  # fmt: skip
    highest = 0
    for _ in range(60):
        grow(manager, manager.computed.get("a", 0) + rng.randint(1, 7), chunk=rng.randint(1, 5))
        computed = manager.computed["a"]
        # a promise holds against the longest length so far: going back does not renew it
        highest = max(highest, computed)
        tokens = rng.randint(max(0, highest - 5), computed) if computed > highest - 5 else computed
        restart = manager.truncate("a", tokens)
        assert tokens - every < restart.computed <= tokens
        for group, table in zip(manager.groups, tables(manager), strict=True):
            dead = dead_pages(group.retention, 3, restart.computed)
            assert len(table) == table_pages(group.retention, 3, restart.computed)
            assert all(page for i, page in enumerate(table) if i not in dead)
        manager.check_invariants()


def test_a_promise_that_the_copies_cannot_keep_is_refused():
    with pytest.raises(ValueError, match="checkpoints_kept 1: steps back of 5 tokens over states copied every 4"):
        RollbackPolicy(5, 4, checkpoints_kept=1)
    with pytest.raises(ValueError, match="tokens -1: must be 0 or positive"):
        RollbackPolicy(-1)


@pytest.mark.parametrize("part", [STATE, OpenBuffer(ARRAY, ratio=4)], ids=["state", "open buffer"])
def test_a_promise_over_states_without_copies_is_refused(part):
    match = "rollback: tokens 5 needs checkpoint_tokens, the states of group state step back to copies alone"
    for policy in (RollbackPolicy(5), RollbackPolicy(5, checkpoint_prompt=True)):
        with pytest.raises(ValueError, match=match):
            manager_of(FULL, part, rollback=policy)
    # entries are forgotten, whatever is promised
    manager_of(FULL, WINDOW, rollback=RollbackPolicy(5))


PARTS = [FULL, WINDOW, SlidingWindow(2, 8, 8, BF16, window=5, sinks=2), ChunkedLocal(2, 8, 8, BF16, chunk=6),
         CompressedEntries(4, 8, BF16), OpenBuffer(ARRAY, ratio=4), STATE]  # fmt: skip


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.kind}-{part.retention.rule}")
def test_every_spec_says_how_far_it_steps_back(part):
    """By definition, one token after the other: what a query at the shorter length reads must still be held."""
    rule = part.retention
    for tokens in range(24):
        if rule.rule in ("window", "chunk"):
            shortest = tokens
            while shortest and reads(rule, shortest - 1) <= reads(rule, tokens):
                shortest -= 1
            assert part.earliest(tokens) == shortest
        elif part is STATE:
            assert part.earliest(tokens) == tokens
        elif isinstance(part, OpenBuffer):
            assert part.earliest(tokens) == tokens // 4 * 4
        else:
            assert part.earliest(tokens) == 0


def reads(rule, position):
    """Earlier positions that a query at `position` reads; all that is held when the rest goes at once."""
    first = position - rule.size + 1 if rule.rule == "window" else position // rule.size * rule.size
    return {p for p in range(position) if p >= first or p < rule.sinks}
