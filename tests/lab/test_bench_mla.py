"""The benchmark of latent attention: what it runs is the operation, and what it says follows from its rows."""

import pytest

from kvlab.lab import bench_mla
from kvlab.lab.bench_mla import Shape

SMALL = Shape(2, 6, 4, 10, 16)


def test_rows_for_each_number_of_queries(monkeypatch):
    ticks = iter(range(10**6))
    monkeypatch.setattr(bench_mla.time, "perf_counter", lambda: float(next(ticks)))
    found = bench_mla.bench_mla(32, (1, 16, 32), shape=SMALL, repeats=2)
    # a clock that ticks once a call makes both ways equally long, so expanding never wins
    assert [(r.queries, r.time_ratio) for r in found.rows] == [(1, 1.0), (16, 1.0), (32, 1.0)]
    assert found.measured is None
    assert found.rows[0].operation_ratio < 1 < found.rows[2].operation_ratio
    assert found.counted is not None and 1 < found.counted <= 16
    assert all(len(line) <= 80 for line in bench_mla.show(found).splitlines())


def test_both_ways_give_the_same_on_its_pages():
    import torch

    from kvlab.ops.mla_attention import absorbed, expanded

    views, table = bench_mla._pages(SMALL, 100)
    query, up = torch.randn(5, 2, 10), torch.randn(2, 16, 16)
    a, b = (way.chunk(query, up, views, (table, 100), 0.1) for way in (absorbed, expanded))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_chunk_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match="counts up to 512: a chunk cannot be longer than the context of 64 tokens"):
        bench_mla.bench_mla(64)
