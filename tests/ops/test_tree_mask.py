"""Trees of tokens in paged attention: each path through a tree gets what a chain of the same tokens gets."""

import random

import pytest
import torch

from kvlab.ops.attention import paged_attention
from kvlab.ops.batch import make_batch
from kvlab.ops.tree import depths, tree_mask
from kvlab.ops.views import page_views
from kvlab.ops.write_kv import write_kv
from kvlab.specs.formats import get_format
from kvlab.specs.layout import page_layout
from kvlab.specs.parts import Attention

HEADS, KV_HEADS, DIM, SIZE = 4, 2, 6, 3


def pages_of(rows, count=9):
    layout = page_layout(Attention(KV_HEADS, DIM, DIM, get_format("fp64")), SIZE)
    views = page_views(torch.full((count, layout.page_bytes), 255, dtype=torch.uint8), layout)
    table = torch.tensor([[4, 2, 7, 1, 8]], dtype=torch.int32)
    key, value = rows
    slots = [int(table[0, i // SIZE]) * SIZE + i % SIZE for i in range(len(key))]
    write_kv(key, value, views, torch.tensor(slots))
    return views, table


def random_rows(generator, count):
    return tuple(
        torch.randn(count, h, DIM, generator=generator, dtype=torch.float64) for h in (HEADS, KV_HEADS, KV_HEADS)
    )


@pytest.mark.parametrize("ops", ["reference", "torch"])
@pytest.mark.parametrize("seed", range(6))
def test_each_node_equals_the_chain_that_leads_to_it(ops, seed, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", ops)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    before, nodes = rng.randint(1, 6), rng.randint(1, 7)
    parents = [rng.randrange(-1, i) for i in range(nodes)]
    query, key, value = random_rows(generator, before + nodes)
    views, table = pages_of((key, value))
    batch = make_batch([nodes + 1], [before + nodes], table, SIZE)
    object.__setattr__(batch, "tree", tree_mask([parents], torch.device("cpu")))
    got = paged_attention(query[before - 1 :], views, batch, scale=0.4)
    for i in range(nodes):
        path, node = [], i
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        assert depths(parents)[i] == len(path)
        chain = [*range(before), *(before + n for n in path)]
        own, own_table = pages_of((key[chain], value[chain]))
        alone = make_batch([1], [len(chain)], own_table, SIZE)
        wanted = paged_attention(query[before + i : before + i + 1], own, alone, scale=0.4)
        torch.testing.assert_close(got[1 + i], wanted[0], rtol=0, atol=1e-12)


def test_a_chain_as_a_tree_changes_nothing_and_a_level_at_a_time_is_the_same():
    query, key, value = random_rows(torch.Generator().manual_seed(1), 8)
    views, table = pages_of((key, value))
    plain = paged_attention(query[3:], views, make_batch([5], [8], table, SIZE), scale=0.4)
    chain = make_batch([5], [8], table, SIZE)
    object.__setattr__(chain, "tree", tree_mask([[-1, 0, 1, 2]], torch.device("cpu")))
    assert torch.equal(paged_attention(query[3:], views, chain, scale=0.4), plain)
    parents = [-1, -1, 0, 1]
    whole, last = make_batch([5], [8], table, SIZE), make_batch([2], [8], table, SIZE)
    for batch in (whole, last):
        object.__setattr__(batch, "tree", tree_mask([parents], torch.device("cpu")))
    every = paged_attention(query[3:], views, whole, scale=0.4)
    assert not torch.equal(every, plain)
    torch.testing.assert_close(paged_attention(query[6:], views, last, scale=0.4), every[3:], rtol=0, atol=1e-12)


def test_rules_that_go_by_positions_refuse_trees():
    query, key, value = random_rows(torch.Generator().manual_seed(1), 4)
    views, table = pages_of((key, value))
    batch = make_batch([2], [4], table, SIZE)
    object.__setattr__(batch, "tree", tree_mask([[-1, -1]], torch.device("cpu")))
    for rule in ({"window": 2}, {"chunk": 4}, {"alibi": torch.ones(HEADS)}):
        with pytest.raises(ValueError, match="trees"):
            paged_attention(query[2:], views, batch, scale=1.0, **rule)
