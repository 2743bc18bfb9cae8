"""Rotary position embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlab.ops.rope import reference


@dataclass(frozen=True, eq=False)
class Angles:
    """By what rows are turned, as arguments of `rope`: `cos`, `sin` [max_position, R / 2], `positions` int64 [T], and
    whether pairs are `interleaved`."""

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    interleaved: bool = False


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """`x` with its first R dimensions rotated by the angles of each token's position, in x's dtype.

    Dimension i pairs with i + R / 2 (the "half" convention of Llama), or, `interleaved`, 2i with 2i + 1 (GPT-J, GLM,
    Cohere); dimensions from R on pass unchanged.

    Args:
        x: [T, H, D].
        cos, sin: [max_position, R / 2], R <= D; an attention factor is already in them.
        positions: int64 [T].
    """
    return reference.rope(x, cos, sin, positions, interleaved)
