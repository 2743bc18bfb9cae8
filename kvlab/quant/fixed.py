"""Scales that are fixed before a cache is filled."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class FixedScales:
    """Scales that were found once from data: rows are divided by them before they are encoded.

    Attributes:
        k, v: fp32 [Hkv or 1, D or 1] each.

    Raises:
        ValueError: a scale that is zero, negative, infinite or NaN.
    """

    k: torch.Tensor
    v: torch.Tensor

    def __post_init__(self) -> None:
        for name, scale in (("k", self.k), ("v", self.v)):
            if not bool((scale.isfinite() & (scale > 0)).all()):
                raise ValueError(f"scale of {name} {scale.flatten()[:4].tolist()}: must be positive and finite")

    @property
    def bytes(self) -> int:
        """Bytes of the scales, kept once per layer beside the pool."""
        return 4 * (self.k.numel() + self.v.numel())
