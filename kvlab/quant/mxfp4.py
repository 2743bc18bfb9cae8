"""MXFP4: e2m1 codes, one power of two per 32 values (e8m0: 8 exponent bits). Source: OCP Microscaling v1.0."""

from __future__ import annotations

import torch

from kvlab.quant import e2m1
from kvlab.quant.groups import split
from kvlab.quant.packing import pack, unpack

GROUP = 32


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed codes uint8 [..., ceil(D / 2)], exponents uint8 [..., ceil(D / 32)]) of `x` [..., D].

    The exponent is floor(log2(max|x|)) - 2, so that the largest value lands between 4 and 8; what lands above 6 is
    stored as 6 (section 6.3 of the source). 255 stands for a group with NaN or infinity.
    """
    grouped = split(x.float(), GROUP)
    largest = grouped.abs().amax(-1)
    exponent = torch.frexp(largest).exponent - 1 - 2  # frexp's mantissa is in [0.5, 1)
    biased = (exponent + 127).clamp(0, 254)
    codes = e2m1.to_codes(grouped / torch.exp2(biased.float() - 127)[..., None])
    biased = torch.where(torch.isfinite(largest), biased, 255)
    return pack(codes.flatten(-2)[..., : x.shape[-1]], 4), biased.to(torch.uint8)


def decode(packed: torch.Tensor, meta: torch.Tensor | None, width: int | None = None) -> torch.Tensor:
    """The rows in fp32."""
    assert meta is not None
    width = 2 * packed.shape[-1] if width is None else width
    scale = torch.where(meta == 255, torch.nan, torch.exp2(meta.float() - 127))
    return (split(e2m1.to_values(unpack(packed, 4, width)), GROUP) * scale[..., None]).flatten(-2)[..., :width]
