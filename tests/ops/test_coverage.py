"""Which pages no kernel reads: the whole list, so that a format or width that falls back does so on purpose."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux only")

from paged import poisoned_views

from kvlab.ops.attention import coverage, triton_, triton_grouped
from kvlab.ops.grouped_views import GroupedViews
from kvlab.ops.mla_attention import triton_ as latents
from kvlab.ops.views import part_views
from kvlab.quant import row_formats
from kvlab.specs.formats import FORMATS, get_format
from kvlab.specs.grouped import grouped
from kvlab.specs.layout import page_layout
from kvlab.specs.parts import Attention, MLALatent

WIDTHS = [(n, n) for n in (64, 72, 80, 96, 112, 128, 160, 192, 256)] + [(192, 128)]
GATHERED = {"fp64", "int3_had", "kvquant3"}


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_width_of_the_list_is_read_in_every_format_but_three(fmt: str) -> None:
    for dims in WIDTHS:
        views = _views(fmt, *dims)
        supports = triton_grouped.supports if isinstance(views, GroupedViews) else triton_.supports
        read = supports(torch.empty(1, 2, dims[0], dtype=torch.bfloat16), views)
        assert read == (not coverage.fallback(fmt, *dims)) == (fmt not in GATHERED), dims


def _views(fmt: str, key_dim: int, value_dim: int):
    if fmt in row_formats():
        return poisoned_views(fmt, 1, key_dim, 16, 1, value_dim)
    closed, window = grouped(Attention(1, key_dim, value_dim, get_format("bf16")), 0, get_format(fmt))
    layouts = page_layout(closed, 1), page_layout(window, closed.format.group_tokens)
    return GroupedViews(closed, *(part_views(torch.zeros(1, x.page_bytes, dtype=torch.uint8), x) for x in layouts))


def test_odd_rows_of_packed_codes_are_gathered() -> None:
    query = torch.empty(1, 2, 63)
    for fmt in row_formats():
        read = triton_.supports(query, poisoned_views(fmt, 1, 63, 4, 1))
        assert read == (not coverage.fallback(fmt, 63)) == (fmt in coverage.WHOLE)
        assert coverage.fallback(fmt, 64, 63) or fmt in coverage.WHOLE


@pytest.mark.parametrize("fmt", row_formats())
def test_latents_are_read_in_formats_of_one_value_a_code(fmt: str) -> None:
    layout = page_layout(MLALatent(512, 64, get_format(fmt)), 4)
    views = part_views(torch.zeros(1, layout.page_bytes, dtype=torch.uint8), layout)
    read = latents.supports(torch.empty(1, 2, 192), views)
    assert read == (not coverage.latent_fallback(fmt)) == (fmt in ("fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"))
