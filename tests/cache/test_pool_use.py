"""What every byte of a pool is for, against a count that looks at each row of each page of each request."""

import random

import pytest

from kvlab.cache import KVCacheManager
from kvlab.cache.waste import pool_use
from kvlab.specs.formats import get_format
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import Attention, ChunkedLocal, CompressedEntries, RecurrentState, SlidingWindow, StateArray
from kvlab.specs.pools import POOLS, pool_layout
from kvlab.specs.rollback import RollbackPolicy

BF16, INT8 = get_format("bf16"), get_format("int8")
FULL = Attention(2, 12, 12, INT8)  # rows of 12 codes in 16 bytes, and a scale
WINDOW = SlidingWindow(2, 16, 16, BF16, window=7, sinks=2)
CHUNK = ChunkedLocal(1, 16, 16, BF16, chunk=6)
ENTRIES = CompressedEntries(2, 20, BF16)
STATE = RecurrentState("mamba2", (StateArray("ssm", ((4, 8),), 7, BF16),))


def manager_of(pools, rollback, num_blocks=60):
    parts = [(FULL,), (WINDOW, STATE), (ENTRIES,), (CHUNK,), (FULL,), (WINDOW,)]
    spec = ModelSpec("m", "m", tuple(LayerSpec(i, p) for i, p in enumerate(parts)), 32, 4, 64)
    layout = pool_layout(spec, 4, pools)
    return KVCacheManager(layout, [num_blocks] * len(layout.buffers), 8, rollback=rollback)


def will_be_read(rule, position, computed):
    """Whether a query at `computed` or later reads the entry of `position`, found by trying later queries."""
    if position >= computed:
        return False
    for query in range(computed, computed + 12):
        first = query - rule.size + 1 if rule.rule == "window" else 0
        first = query // rule.size * rule.size if rule.rule == "chunk" else first
        if position >= first or position < rule.sinks:
            return True
    return False


def useful_by_hand(manager):
    """Bytes of every entry of every held page that a later query reads, and of every state in use."""
    total = 0
    for name, computed in manager.computed.items():
        for g, group in enumerate(manager.groups):
            entry = sum(part.entry_bytes for part in group.parts)
            for i, page in enumerate(manager.block_table(name, g)):
                if not page:
                    continue
                rule = group.retention
                if rule.rule == "state":
                    total += sum(part.fixed_bytes for part in group.parts) if computed else 0
                elif rule.rule == "stride":
                    ends = range(i * group.block_size + rule.size, (i + 1) * group.block_size + 1, rule.size)
                    total += entry * sum(end <= computed for end in ends)
                else:
                    positions = range(i * group.block_size, (i + 1) * group.block_size)
                    total += entry * sum(will_be_read(rule, p, computed) for p in positions)
    return total


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("rollback", [RollbackPolicy(), RollbackPolicy(3, 4, True)], ids=["plain", "kept"])
def test_useful_and_waste_are_the_storage(pools, rollback, seed):
    manager, rng = manager_of(pools, rollback), random.Random(3 + seed)
    seen = set()
    for step in range(60):
        name, done = f"r{rng.randrange(3)}", 0
        if name in manager.computed and rng.random() < 0.1:
            manager.free(name)
        done = manager.computed.get(name, 0)
        tokens = done + rng.randint(1, 5)
        if manager.allocate(name, tokens, rollback.at(tokens, 5)) and step % 4:
            manager.advance(name, tokens)
        use = pool_use(manager)
        assert use.storage == manager.layout.pool_bytes([60] * len(manager.unit_pools))
        assert use.useful == useful_by_hand(manager)
        assert use.held == manager.held_bytes
        assert min(vars(use).values()) >= 0
        seen |= {kind for kind, value in vars(use).items() if value}
    expected = {"useful", "page_tail", "padding", "reserve", "free", "null"}
    expected |= {"remainder"} if pools == "sectors" else set()
    expected |= {"kept_states"} if rollback.checkpoint_tokens else set()
    # what other seeds draw may show less
    assert seen <= expected if seed else seen == expected


def test_a_story_in_bytes():
    """One sequence of 5 tokens in pages of 4, one unit of each kind at a time."""
    parts = (Attention(1, 8, 8, BF16),)  # 32 bytes a token
    spec = ModelSpec("m", "m", (LayerSpec(0, parts), LayerSpec(1, (STATE,))), 32, 4, 64)
    manager = KVCacheManager(pool_layout(spec, 4), [4, 3], 8)
    manager.allocate("a", 5)
    manager.advance("a", 5)
    use = pool_use(manager)
    assert use.useful == 5 * 32 + 448
    assert use.page_tail == 3 * 32
    assert use.free == 128 + 448 and use.null == 128 + 448
    assert (use.padding, use.reserve, use.kept_states, use.remainder) == (0, 0, 0, 0)
    manager.allocate("a", 12)
    assert pool_use(manager).reserve == 128
