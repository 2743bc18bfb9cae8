"""Keys and values of different widths: the CPU kernels refuse what they would write over the next row."""

import pytest
import torch

from kvlab.ops.views import page_views
from kvlab.specs.formats import get_format
from kvlab.specs.layout import page_layout
from kvlab.specs.parts import Attention


@pytest.mark.parametrize("widths", [(8, 4), (192, 128), (5, 6)])
def test_cpu_geometry_refuses_unequal_widths(widths):
    layout = page_layout(Attention(2, *widths, get_format("fp32")), 4)
    views = page_views(torch.zeros(3, layout.page_bytes, dtype=torch.uint8), layout)
    with pytest.raises(ValueError, match=f"head_dim of keys {widths[0]}, of values {widths[1]}"):
        _ = views.geometry
