"""The walk over pages that a chapter shows: the kernel's result, each page once, nothing behind the end."""

import itertools

import pytest
import torch

from kvlab.book.page_walk import example, walk
from kvlab.ops.attention import paged_attention


@pytest.mark.parametrize(("table", "length"), [([5], 3), ([5, 2, 7], 12), ([5, 2, 7], 9), ([3, 1, 2, 6, 4], 17)])
def test_the_walk_ends_where_the_kernel_does(table, length, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "torch")  # what the compiled kernel is compared with too, in tests/ops
    query, views, batch = example(table, length, block_size=4, head_dim=8, seed=length)
    visits, out = walk(query[0, 0], views, table, length, scale=0.3)
    assert torch.allclose(out, paged_attention(query, views, batch, scale=0.3)[0, 0], atol=1e-6)
    assert [v.page for v in visits] == table[: -(-length // 4)]
    assert [p for v in visits for p in v.tokens] == list(range(length))
    assert all(a.best <= b.best for a, b in itertools.pairwise(visits))
    # the sum of weights is that of all scores at once
    keys = torch.cat([views.k[v.page, 0, : len(v.tokens)] for v in visits])
    scores = keys @ query[0, 0] * 0.3
    assert visits[-1].total == pytest.approx(float((scores - scores.max()).exp().sum()), rel=1e-5)


def test_a_wrong_entry_in_the_table_shows():
    query, views, _ = example([5, 2, 7], 12, block_size=4, head_dim=8)
    assert walk(query[0, 0], views, [5, 3, 7], 12, scale=0.3)[1].isnan().all()
