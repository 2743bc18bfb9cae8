"""What a query sees of its sequence, and how scores become weights: the options of attention as one record."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Rules:
    """The options of `kvlab.ops.attention.paged_attention`, under the names they have there."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    chunk: int = 0
    sinks: torch.Tensor | None = None
    alibi: torch.Tensor | None = None

    def lowest(self, position: int) -> int:
        """The lowest position that a query at `position` sees."""
        low = max(0, position - self.window + 1) if self.window else 0
        return max(low, position // self.chunk * self.chunk) if self.chunk else low

    def seen(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        """Whether the query at `q_pos` sees the key at `k_pos`, bool of the shape both broadcast to."""
        mask = k_pos <= q_pos
        if self.window:
            mask = mask & (k_pos > q_pos - self.window)
        if self.chunk:
            mask = mask & (k_pos >= torch.div(q_pos, self.chunk, rounding_mode="floor") * self.chunk)
        return mask

    def weights(self, products: torch.Tensor, seen: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        """Attention weights [..., Hq, T, S] from products of queries and keys; 0 where not `seen`.

        Args:
            products: [..., Hq, T, S], fp32 or fp64.
            seen: bool, broadcast over it; a query that sees nothing gets only zeros.
            distance: [..., T, S], key position minus query position.
        """
        scores = products * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.alibi is not None:
            scores = scores + self.alibi.to(scores)[:, None, None] * distance.to(scores.dtype)
        # finite, so that a query that sees nothing stays finite
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        if self.sinks is None:
            return scores.softmax(dim=-1).masked_fill(~seen, 0)
        sinks = self.sinks.to(scores)[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1].masked_fill(~seen, 0)
