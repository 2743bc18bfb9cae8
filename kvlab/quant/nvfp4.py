"""NVFP4: e2m1 codes, one e4m3 scale per 16 values. The format's second scale, one fp32 per tensor, is 1 here."""

from __future__ import annotations

import torch

from kvlab.quant import e2m1, fp8_e4m3
from kvlab.quant.groups import split
from kvlab.quant.packing import pack, unpack

GROUP = 16
SMALLEST = 2.0**-9  # smallest e4m3 above zero


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed codes uint8 [..., ceil(D / 2)], scales e4m3 [..., ceil(D / 16)]) of `x` [..., D].

    scale = max|x| / 6, rounded to e4m3, so values up to 2,688 keep their size; a group with NaN or infinity gets a
    scale of NaN.
    """
    grouped = split(x.float(), GROUP)
    largest = grouped.abs().amax(-1)
    wanted = (largest / e2m1.MAX).clamp_min(SMALLEST)
    wanted = torch.where(torch.isfinite(largest), wanted, torch.full_like(wanted, torch.nan))
    scale = fp8_e4m3.encode(wanted)[0]
    codes = e2m1.to_codes((grouped / scale.float()[..., None]).nan_to_num(0.0))
    return pack(codes.flatten(-2)[..., : x.shape[-1]], 4), scale


def decode(packed: torch.Tensor, meta: torch.Tensor | None, width: int | None = None) -> torch.Tensor:
    """The rows in fp32."""
    assert meta is not None
    width = 2 * packed.shape[-1] if width is None else width
    return (split(e2m1.to_values(unpack(packed, 4, width)), GROUP) * meta.float()[..., None]).flatten(-2)[..., :width]
