"""Fixed scales of fp8: where they come from, what they refuse, and what a later, larger value becomes."""

from __future__ import annotations

import pytest
import torch

from kvlab.quant.calibrate import calibrate, clipped, scale_of
from kvlab.quant.fixed import FixedScales
from kvlab.quant.fp8_e4m3 import decode, encode


def rows(tokens: int = 30) -> torch.Tensor:
    x = torch.randn(tokens, 2, 8, generator=torch.Generator().manual_seed(1))
    x[:, 1] *= 50
    x[:, 0, 3] *= 9
    return x


def test_each_share_has_its_shape_and_the_largest_value_becomes_448() -> None:
    x = rows()
    assert scale_of(x, "tensor").shape == (1, 1) and scale_of(x, "head").shape == (2, 1)
    assert scale_of(x, "channel").shape == (2, 8)
    for share in ("tensor", "head", "channel"):
        assert float((x.abs() / scale_of(x, share)).max()) == pytest.approx(448)
        assert clipped(x, scale_of(x, share)) == 0.0


def test_finer_scales_spare_small_values() -> None:
    x = rows() * 1e-5  # at scale 1 these lie below the smallest normal code
    error = {}
    for share in ("tensor", "head", "channel"):
        scale = scale_of(x, share)
        error[share] = float((decode(encode(x / scale)[0]) * scale - x)[:, 0].norm() / x[:, 0].norm())
    at_one = float((decode(encode(x)[0]) - x)[:, 0].norm() / x[:, 0].norm())
    assert at_one > 0.5 and max(error.values()) < 0.05


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_must_be_positive_and_finite(bad: float) -> None:
    """Pitfall: mobius#447."""
    good = torch.ones(1, 1)
    with pytest.raises(ValueError, match="must be positive and finite"):
        FixedScales(torch.tensor([[bad]]), good)
    with pytest.raises(ValueError, match="must be positive and finite"):
        FixedScales(good, torch.tensor([[1.0], [bad]]))


def test_calibration_refuses_nothing_and_what_is_not_finite() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        scale_of(torch.empty(0, 2, 8), "tensor")
    with pytest.raises(ValueError, match="finite"):
        scale_of(torch.full((1, 1, 2), torch.nan), "head")
    with pytest.raises(ValueError, match="share 'row'"):
        scale_of(rows(), "row")


def test_a_later_key_above_the_calibrated_largest_is_clamped_in_silence() -> None:
    """transformers' Fp8QuantizedLayer freezes its scale at the first update: a key 1.2 times as large comes back clipped."""
    x = rows()
    scale = scale_of(x, "tensor")
    later = x * 1.2
    back = decode(encode(later / scale)[0]) * scale
    assert back.isfinite().all() and float(back.abs().max()) == pytest.approx(float(x.abs().max()))
    assert clipped(later, scale) > 0
    assert calibrate([(x, x)])[0].bytes == 8
