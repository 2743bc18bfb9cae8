"""fp4 e2m1: 1 sign, 2 exponent, 1 mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. No NaN, no infinity."""

from __future__ import annotations

from itertools import pairwise

import torch

from kvlab.quant.tables import table

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX = 6.0
_SIGNED = (*VALUES, *(-v for v in VALUES))
# half way between neighbours: where two codes meet
_BORDERS = tuple((a + b) / 2 for a, b in pairwise(VALUES))


def to_codes(x: torch.Tensor) -> torch.Tensor:
    """uint8 codes of `x`, the nearest value; half way between two the one with an even last bit. |x| above 6 is 6."""
    size = x.abs()
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for code, border in enumerate(_BORDERS, start=1):
        # an odd code does not take its lower border, an even code does
        codes += (size > border) if code % 2 else (size >= border)
    return codes | (torch.signbit(x).to(torch.uint8) << 3)


def to_values(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of codes 0 .. 15."""
    return table(_SIGNED, codes.device)[codes.int()]
