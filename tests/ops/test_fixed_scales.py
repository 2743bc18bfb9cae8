"""Rows that are stored under scales found from data come back the same whoever reads them, and whatever the page's shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged import fill

from kvlab.ops.attention import reference, torch_
from kvlab.ops.attention.rules import Rules
from kvlab.ops.page_scores.reference import page_bounds
from kvlab.ops.selected_pages import reference as chosen_pages
from kvlab.ops.selected_pages import torch_ as chosen_dense
from kvlab.quant.calibrate import SHARES
from kvlab.quant.fixed import FixedScales

SIDES = {"tensor": (1, 1), "head": (3, 1), "channel": (3, 8)}


def scaled(share: str, block_size: int):
    """Two sequences in fp8 pages whose rows count 0.1 to 5 times what their codes say; the factors of keys and values."""
    paged = fill("fp8_e4m3", (3, 8, block_size), ([1, 1], [13, 5]))
    generator = torch.Generator().manual_seed(1)
    k, v = (0.1 + 4.9 * torch.rand(SIDES[share], generator=generator) for _ in range(2))
    paged.keys, paged.values = [x * k for x in paged.keys], [x * v for x in paged.values]
    return replace(paged, views=replace(paged.views, fixed=FixedScales(k, v)))


@pytest.mark.parametrize("block_size", [4, 3])  # with 3 tokens a page is as long as it has heads
@pytest.mark.parametrize("share", SHARES)
def test_bounds_of_pages_are_those_of_their_keys(share: str, block_size: int) -> None:
    paged = scaled(share, block_size)
    counts = torch.zeros(len(paged.views.k), dtype=torch.int64)
    expected = torch.zeros(2, len(counts), 3, 8, dtype=torch.float64)
    for row, keys in zip(paged.batch.block_table.tolist(), paged.keys, strict=True):
        for page, rows in zip(row, keys.split(block_size), strict=False):
            counts[page] = len(rows)
            expected[:, page] = torch.stack((rows.amin(0), rows.amax(0)))
    for mine, right in zip(page_bounds(paged.views, counts), expected, strict=True):
        torch.testing.assert_close(mine, right.float())


@pytest.mark.parametrize("block_size", [4, 3])
@pytest.mark.parametrize("share", SHARES)
def test_attention_and_chosen_pages_read_the_same_rows(share: str, block_size: int) -> None:
    from paged import oracle

    paged = scaled(share, block_size)
    query = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(2))
    expected = oracle(query, paged, 0.3).float()
    for attention in (reference, torch_):
        out = torch.zeros_like(query)
        attention.paged_attention(query, paged.views, paged.batch, Rules(0.3), out)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    every = torch.arange(5, dtype=torch.int32).expand(2, 3, 5)
    for chosen in (chosen_pages, chosen_dense):
        found = chosen.selected_pages(query, paged.views, paged.batch, every, 0.3)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
