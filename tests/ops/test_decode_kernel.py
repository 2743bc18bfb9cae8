"""What the CPU decode kernel promises beyond being right: the same bits alone, in a batch, on any number of threads."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from paged import fill

from kvlab.ops import numba_support
from kvlab.ops.attention import paged_attention
from kvlab.ops.batch import make_batch
from kvlab.ops.views import page_views
from kvlab.ops.write_kv import write_kv
from kvlab.specs.formats import get_format
from kvlab.specs.layout import page_layout
from kvlab.specs.parts import Attention

pytestmark = pytest.mark.skipif(not numba_support.available(), reason="Numba is not installed")


@pytest.fixture(autouse=True)
def cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_OPS", "cpu")


def test_batch_mates_do_not_change_a_bit() -> None:
    paged = fill("fp32", (3, 64, 16), ([1] * 5, [300, 1, 129, 63, 17]))
    query = torch.randn(5, 9, 64)
    together = paged_attention(query, paged.views, paged.batch, scale=0.125)
    for b in range(5):
        batch = dataclasses.replace(
            paged.batch,
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=paged.batch.seq_lens[b : b + 1],
            block_table=paged.batch.block_table[b : b + 1],
            num_seqs=1, num_tokens=1, num_decodes=1,
        )  # fmt: skip
        alone = paged_attention(query[b : b + 1], paged.views, batch, scale=0.125)
        assert torch.equal(alone[0], together[b]), f"sequence {b}"


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    paged = fill("bf16", (2, 64, 16), ([1] * 3, [400, 5, 257]))
    query = torch.randn(3, 8, 64)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(paged_attention(query, paged.views, paged.batch, scale=0.125))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "int8", "int4", "fp8_e4m3"])
def test_the_page_size_does_not_change_a_bit(fmt: str) -> None:
    """Rows that are read four at a time in one page size are read alone in another."""
    key, value, query = torch.randn(301, 2, 64), torch.randn(301, 2, 64), torch.randn(1, 8, 64)
    results = []
    for block_size in (1, 7, 16):
        layout, pages = page_layout(Attention(2, 64, 64, get_format(fmt)), block_size), -(-301 // block_size)
        table = (torch.randperm(pages) + 1)[None].to(torch.int32)
        views = page_views(torch.zeros((pages + 1, layout.page_bytes), dtype=torch.uint8), layout)
        write_kv(key, value, views, make_batch([301], [301], table, block_size).slot_mapping)
        results.append(paged_attention(query, views, make_batch([1], [301], table, block_size), scale=0.125))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
