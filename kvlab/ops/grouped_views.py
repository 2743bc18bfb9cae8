"""Views of a layer with closed groups and a recent window: two sets of pages that attention reads as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvlab.ops.views import PageViews, SegmentViews
from kvlab.specs.grouped import ClosedGroups

Turn = Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]


@dataclass(frozen=True, eq=False)
class GroupedViews:
    """The pages of one layer.

    Attributes:
        part: what is closed, its shapes and its format.
        closed: its segments, an entry per group. recent: keys and values of the last tokens.
        turn: (keys [n, Hkv, D], positions int64 [n], back) -> keys turned by their positions, or turned back; None
            where keys are stored as attention gets them.
    """

    part: ClosedGroups
    closed: SegmentViews
    recent: PageViews
    turn: Turn | None = None

    @property
    def format(self) -> str:
        """Storage format name."""
        return self.part.format.name

    @property
    def group(self) -> int | None:
        """The block table that new tokens are written through, the recent window's; `closed.group` is the other."""
        return self.recent.group

    @property
    def k(self) -> torch.Tensor:
        """Keys of the recent window."""
        return self.recent.k

    @property
    def v(self) -> torch.Tensor:
        """Values of the recent window."""
        return self.recent.v

    @property
    def key_dim(self) -> int:
        """Values of a key."""
        return self.part.key_width

    @property
    def value_dim(self) -> int:
        """Values of a value."""
        return self.part.value_width

    @property
    def block_size(self) -> int:
        """Tokens per page of the recent window."""
        return self.recent.block_size
