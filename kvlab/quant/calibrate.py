"""Fixed scales of fp8 from data: the largest value that a layer's keys and values had becomes the largest code.

One scale per layer ("tensor"), per KV head, or per channel of a head. A later value beyond the calibrated largest is
clamped, silently: how often that happens is what the choice of text decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvlab.quant import fp8_e4m3, fp8_e5m2
from kvlab.quant.fixed import FixedScales

SHARES = {"tensor": (0, 1, 2), "head": (0, 2), "channel": (0,)}
"""The axes of [tokens, Hkv, D] that share a scale."""
LARGEST = {"fp8_e4m3": fp8_e4m3.MAX, "fp8_e5m2": fp8_e5m2.MAX}


def scale_of(rows: torch.Tensor, share: str, fmt: str = "fp8_e4m3") -> torch.Tensor:
    """The scale of `rows` [tokens, Hkv, D], fp32 [Hkv or 1, D or 1]; a channel of zeros gets 1.

    Raises:
        ValueError: an unknown way to share, a format without fixed scales, no tokens, NaN or infinity among them.
    """
    if share not in SHARES:
        raise ValueError(f"share {share!r}: must be one of {', '.join(SHARES)}")
    if fmt not in LARGEST:
        raise ValueError(f"fmt {fmt!r}: must be one of {', '.join(LARGEST)}")
    if not len(rows) or not rows.isfinite().all():
        raise ValueError(f"rows {tuple(rows.shape)}: must be at least one token of finite values")
    largest = rows.float().abs().amax(SHARES[share], keepdim=True)[0]
    return torch.where(largest == 0, torch.ones_like(largest), largest / LARGEST[fmt])


def calibrate(
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]], share: str = "tensor", fmt: str = "fp8_e4m3"
) -> Mapping[int, FixedScales]:
    """Scales by layer, what `EngineOptions.kv_scales` takes, from each layer's keys and values [tokens, Hkv, D].

    Raises:
        ValueError: as `scale_of`.
    """
    return {i: FixedScales(scale_of(k, share, fmt), scale_of(v, share, fmt)) for i, (k, v) in enumerate(layers)}


def clipped(rows: torch.Tensor, scale: torch.Tensor, fmt: str = "fp8_e4m3") -> float:
    """The share of `rows` [tokens, Hkv, D] that are beyond the largest code under `scale`."""
    return float((rows.abs() / scale > LARGEST[fmt] * (1 + 2**-20)).float().mean())
