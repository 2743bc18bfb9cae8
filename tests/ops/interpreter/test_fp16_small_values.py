"""Queries in fp16 where one token takes most of the weight: what is left times a small scale must not vanish."""

from __future__ import annotations

import pytest
import torch
from paged import Paged, oracle, poisoned_views, shuffled_table

from kvlab.ops.attention import coverage, paged_attention
from kvlab.ops.batch import make_batch
from kvlab.quant import get_codec

SCALED = [fmt for fmt, numbers in coverage.WHOLE.items() if numbers] + list(coverage.PACKED)
TOKENS, DIM, SINK = 192, 32, 10.0  # the sink's score above the others': 0.99 of the weight
PAGE = 16


def with_sink(fmt: str, size: float, first: float) -> tuple[torch.Tensor, Paged]:
    """Queries fp16 [4, 2, DIM], a decode and a chunk of three, over values of about `size`; the first token of each
    sequence has `first` times as large ones and takes most of the weight."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(DIM, generator=generator).half()
    table = shuffled_table([TOKENS, TOKENS], PAGE, generator)
    views = poisoned_views(fmt, 1, DIM, PAGE, int(table.max()) + 1)
    batch = make_batch([1, 3], [TOKENS, TOKENS], table, PAGE)
    stored: tuple[list, list] = ([], [])
    for row in table:
        keys = torch.randn(TOKENS, 1, DIM, generator=generator) * 0.1
        values = (torch.randn(TOKENS, 1, DIM, generator=generator) + 0.5) * size
        keys[0] += SINK * query / (query @ query)
        values[0] *= first
        pages, slots = row[torch.arange(TOKENS) // PAGE].long(), torch.arange(TOKENS) % PAGE
        halves = ((keys, views.k, views.k_scale), (values, views.v, views.v_scale))
        for (rows, codes, scales), found in zip(halves, stored, strict=True):
            encoded, scale = get_codec(fmt).encode(rows)
            codes[pages, :, slots] = encoded
            scales[pages, :, slots] = scale
            found.append(get_codec(fmt).decode(encoded, scale, DIM).double())
    return query.expand(4, 2, DIM).contiguous(), Paged(views, batch, *stored)


# of a row of zeros the scale is 1
@pytest.mark.parametrize(("size", "first"), [(0.1, 0.0), (0.001, 0.01)], ids=["zero sink", "small sink"])
@pytest.mark.parametrize("fmt", SCALED)
def test_outputs_keep_their_size(fmt: str, size: float, first: float) -> None:
    query, paged = with_sink(fmt, size, first)
    out = torch.zeros_like(query)
    paged_attention(query, paged.views, paged.batch, scale=1.0, out=out)
    want = oracle(query, paged, 1.0)
    for part in (slice(0, 1), slice(1, 4)):  # decode, prefill
        gain = float((out[part].double() * want[part]).sum() / want[part].square().sum())
        assert gain == pytest.approx(1, abs=2e-3)
