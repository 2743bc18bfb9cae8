"""RMS normalisation."""

from __future__ import annotations

import torch

from kvlab.ops.norm import reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in x's dtype.

    The mean and the quotient are taken in fp32 (fp64 for fp64) and rounded to x's dtype before `weight` multiplies,
    as Llama does.

    Args:
        x: [..., H].
        weight: [H].
    """
    return reference.rms_norm(x, weight, eps)
