"""The attention bench: what it would run at every load, and one tiny run of all its sides. No time is asserted."""

from __future__ import annotations

import pytest
import torch

from kvlab.lab import bench_attention as bench


def test_every_load_reads_far_more_than_the_cache_or_is_left_out() -> None:
    for cache in (2**20, 32 * 2**20):
        for name, lens in bench.LOADS.items():
            load = bench.plan_load(name, lens, cache)
            assert load is not None and load.working_set >= 4 * cache
            assert load.working_set == load.layers * sum(lens) * 3 * 64 * 8
            assert load.working_set <= max(bench.MEMORY, sum(lens) * 3 * 64 * 8)
    assert bench.plan_load("64 x 1", (64,), 2**30) is None, "memory ends before four times such a cache"


def test_sides_see_the_same_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixed load: the pages hold what was written, and contiguous attention is called once per length."""
    monkeypatch.setenv("KVLAB_OPS", "torch")
    views, batch = bench.pages_of("fp32", (5, 40, 5), 2)
    assert batch.seq_lens.tolist() == [5, 40, 5] and len(views) == 2
    assert torch.equal(views[0].buffer, views[1].buffer) and views[0].buffer.data_ptr() != views[1].buffer.data_ptr()
    used = batch.block_table[batch.block_table > 0].tolist()
    assert len(used) == len(set(used)) == 5


def test_torch_computes_the_same_whichever_way_its_rows_are_given() -> None:
    query, key, value = torch.randn(2, 9, 64), torch.randn(2, 3, 7, 64), torch.randn(2, 3, 7, 64)
    weights = (query.unflatten(1, (3, 3)) @ key.mT / 8).softmax(-1)
    expected = (weights @ value).flatten(1, 2)
    for grouped in (False, True):
        assert torch.allclose(bench.attend(query, key, value, grouped), expected, atol=1e-5)


def test_the_same_pages_are_read_in_both_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_OPS", "torch")
    torch.manual_seed(0)
    _, batch = bench.pages_of("fp32", (100,), 1)
    ordered = bench.in_order(batch)
    assert ordered.block_table.tolist() == [list(range(1, 8))] == [sorted(batch.block_table[0].tolist())]
    assert batch.block_table.tolist() != ordered.block_table.tolist() and ordered.seq_lens.tolist() == [100]
    monkeypatch.setattr(bench, "last_level_cache", lambda: 1000)
    found = bench.apart(100, 1)
    assert set(found) == {"scattered", "ungrouped", "ours"} and min(found.values()) > 0


def test_a_record_has_ratios_and_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_OPS", "torch")
    monkeypatch.setattr(bench, "LOADS", {"20 x 2": (20, 20), "20 and 7": (20, 20, 7)})
    monkeypatch.setattr(bench, "last_level_cache", lambda: 1000)
    monkeypatch.setattr(bench, "LAYERS", 2)
    record = bench.run_bench(2)
    assert [r["load"] for r in record["rows"]] == ["20 x 2", "20 and 7"]
    assert all(r["paged_over_contiguous"] > 0 and r["int4_speed"] > 0 and r["layers"] == 2 for r in record["rows"])
    assert {"what", "date", "commit", "device", "versions", "command"} <= set(record)
    assert "20 and 7" in bench.report(record)
    with pytest.raises(ValueError, match="only 9: must be among 20 x 2; 20 and 7"):
        bench.run_bench(1, ["9"])
