"""What the CPU decode kernel promises beyond being right: the same bits alone, in a batch, on any number of threads."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from paged import fill

from kvlab.ops import numba_support
from kvlab.ops.attention import paged_attention

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
