"""An overflow must stay visible: infinity is stored as NaN by every 8-bit format."""

import pytest
import torch

from kvlab.quant import get_codec


@pytest.mark.parametrize("name", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_infinity_and_nan_decode_to_nan_and_large_values_do_not(name, bad):
    codec = get_codec(name)
    assert codec.decode(*codec.encode(torch.tensor([[1.0, bad]])))[0, 1].isnan()
    assert codec.decode(*codec.encode(torch.tensor([[1.0, 1e9]]))).isfinite().all()
