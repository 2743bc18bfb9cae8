"""Trees of tokens at the end of sequences: which of them each sees.

The last tokens of a sequence may be a tree instead of a chain: several tokens that might follow the same one. Each has a
slot of its own, in an order in which parents come first; its position is its depth, so siblings share one; it sees what
stands before the tree, its ancestors and itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TreeMask:
    """The trees of a batch.

    Attributes:
        ancestors: bool [B, M, M], whether node j of sequence b's tree is node i or an ancestor of it.
        sizes: int64 [B], nodes of each tree: the last slots of its sequence; 0 where a sequence has none.
    """

    ancestors: Tensor
    sizes: Tensor

    def seen(self, which: slice, slots: tuple[Tensor, Tensor], seq_lens: Tensor) -> Tensor:
        """Whether a query sees a key as far as the trees go, bool [b, T, S].

        Args:
            which: the sequences. slots: places in the sequence of the queries [b, T] and of the keys [S].
            seq_lens: int64 [b, 1].
        """
        first = seq_lens - self.sizes[which, None]
        row, column = slots[0] - first, slots[1] - first
        limit = self.ancestors.shape[1] - 1
        index = torch.arange(len(row), device=row.device)[:, None, None]
        pairs = self.ancestors[which][index, row.clamp(0, limit)[..., None], column.clamp(0, limit)[:, None]]
        return pairs | (row < 0)[..., None] | (column < 0)[:, None]


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node, 1 for those whose parent is -1, the token before the tree."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def tree_mask(trees: Sequence[Sequence[int]], device: torch.device) -> TreeMask:
    """The mask of sequences whose trees have these parents: for each node the index of its parent, -1 for none."""
    widest = max(map(len, trees))
    ancestors = torch.zeros(len(trees), widest, widest, dtype=torch.bool)
    for own, parents in zip(ancestors, trees, strict=True):
        for i, parent in enumerate(parents):
            if parent >= 0:
                own[i] = own[parent]
            own[i, i] = True
    sizes = torch.tensor([len(parents) for parents in trees])
    return TreeMask(ancestors.to(device), sizes.to(device))
