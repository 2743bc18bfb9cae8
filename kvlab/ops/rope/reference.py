"""rope, written out."""

from __future__ import annotations

import torch


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """See `kvlab.ops.rope.rope`."""
    half = cos.shape[1]
    if interleaved:  # pairs lie side by side: bring them apart, turn, bring them back
        order = torch.arange(x.shape[-1], device=x.device)
        order = torch.cat((order[: 2 * half : 2], order[1 : 2 * half : 2], order[2 * half :]))
        return rope(x[..., order], cos, sin, positions)[..., order.argsort()]
    c, s = (table[positions][:, None].to(x.dtype) for table in (cos, sin))  # [T, 1, R / 2]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * c - second * s, second * c + first * s, rest), dim=-1)
