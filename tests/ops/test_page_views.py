"""Views alias the pool's bytes where the layout says."""

from __future__ import annotations

import pytest
import torch

from kvlab.ops.views import page_views
from kvlab.specs.formats import get_format
from kvlab.specs.layout import page_layout
from kvlab.specs.parts import Attention


@pytest.mark.parametrize("fmt", ["fp64", "fp32", "bf16", "fp16", "fp8_e4m3", "int8"])
def test_each_value_has_its_own_bytes(fmt: str) -> None:
    layout = page_layout(Attention(2, 20, 20, get_format(fmt)), 3)
    buffer = torch.zeros(4, layout.page_bytes, dtype=torch.uint8)
    views = page_views(buffer, layout)
    assert views.k.shape == views.v.shape == (4, 2, 3, 20)
    parts = [views.k, views.v] + ([views.k_scale, views.v_scale] if views.k_scale is not None else [])
    for part in parts:
        part.view(torch.uint8).fill_(1) if part.dtype.itemsize == 1 else part.fill_(torch.nan)
    changed = int((buffer != 0).sum())
    sizes = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "int8": 1}
    if sizes[fmt] == 1:
        assert changed >= 4 * 2 * 3 * 20 * 2
    assert changed <= 4 * layout.used_bytes
    assert not buffer[:, layout["k"].used_bytes : layout["k"].row_bytes].any(), "row padding is not part of a view"


def test_a_token_of_int8_has_its_scale_in_the_page() -> None:
    layout = page_layout(Attention(3, 64, 64, get_format("int8")), 16)
    views = page_views(torch.zeros(2, layout.page_bytes, dtype=torch.uint8), layout)
    assert views.k_scale.shape == (2, 3, 16, 1)
    views.v_scale[1, 2, 15] = 1.5
    last = layout["v_scale"].offset + (2 * 16 + 15) * 4
    assert views.buffer[1, last : last + 4].view(torch.float32).item() == 1.5


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(2, 128), "must be contiguous uint8"),
        (torch.zeros(2, 256, dtype=torch.uint8)[:, ::2], "must be contiguous uint8"),
        (torch.zeros(2, 64, dtype=torch.uint8), "buffer of 64 bytes a page: the layout has 128"),
    ],
)
def test_wrong_buffers_are_refused(buffer: torch.Tensor, message: str) -> None:
    layout = page_layout(Attention(1, 16, 16, get_format("fp32")), 1)
    with pytest.raises(ValueError, match=message):
        page_views(buffer, layout)
