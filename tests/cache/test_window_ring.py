"""Exactly which positions a window's pages hold around W and 2W tokens, page by page.

transformers#37574: a cache that rolled one step early lost the oldest token when the total was exactly the window.
"""

import pytest

from kvlab.cache import KVCacheManager
from kvlab.specs.formats import get_format
from kvlab.specs.layout import group_parts
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import SlidingWindow

W = 8


def window_manager(block_size, num_blocks=40, in_flight=1):
    part = SlidingWindow(2, 8, 8, get_format("bf16"), window=W)
    spec = ModelSpec("m", "m", (LayerSpec(0, (part,)),), 32, 4, 64)
    return KVCacheManager(group_parts(spec, block_size), [num_blocks], in_flight)


def held_positions(manager):
    size = manager.groups[0].block_size
    return [p for i, page in enumerate(manager.block_table("a")) if page for p in range(i * size, (i + 1) * size)]


# after n tokens with pages of one token: what the next query, at n, reads besides itself
EXACT = {7: range(7), 8: range(1, 8), 9: range(2, 9), 16: range(9, 16), 17: range(10, 17)}


@pytest.mark.parametrize("n", EXACT)
def test_pages_of_one_token_hold_exactly_the_window(n):
    manager = window_manager(1)
    for tokens in range(1, n + 1):
        assert manager.allocate("a", tokens)
        # the query at tokens - 1 still finds its whole window: W positions once there are so many
        assert held_positions(manager) == list(range(max(0, tokens - W), tokens))
        manager.advance("a", tokens)
    assert held_positions(manager) == list(EXACT[n])


# pages of 3 tokens: (n, table) with page ids in the order in which they are taken and reused
STORY = {
    7: [1, 2, 3],  # positions 0..8 have pages, the query at 7 reads 0 on
    8: [1, 2, 3],  # it reads 1 on: page 0 holds 0, 1, 2
    9: [1, 2, 3],  # 2 on
    10: [0, 2, 3, 4],  # 3 on: the first page goes back
    16: [0, 0, 0, 4, 1, 2],  # 9 on: page 2, positions 6..8, is gone too
    17: [0, 0, 0, 4, 1, 2],
}


def test_pages_of_three_tokens_go_back_when_their_last_token_leaves():
    manager = window_manager(3)
    for tokens in range(1, 18):
        assert manager.allocate("a", tokens)
        manager.advance("a", tokens)
        if tokens in STORY:
            assert list(manager.block_table("a")) == STORY[tokens], tokens


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("chunks", [[1] * 17, [7, 1, 1, 7, 1], [8, 8, 1], [9, 8], [17]])
def test_a_query_always_finds_its_window_and_nothing_lives_on_behind_it(block_size, chunks):
    manager = window_manager(block_size, in_flight=max(chunks))
    done = 0
    for chunk in chunks:
        assert manager.allocate("a", done + chunk)
        assert set(range(max(0, done - W + 1), done + chunk)) <= set(held_positions(manager))
        done += chunk
        manager.advance("a", done)
        oldest = min(held_positions(manager))
        assert oldest > done - W + 1 - block_size
