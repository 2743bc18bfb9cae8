"""Which requests of a step have numbers that are not finite in rows from whose logits nobody picks a token.

A NaN anywhere in a layer stays in its row's hidden state to the end, so the last hidden states show each row's. Looking
at the last row of a chunk is not enough: where all layers have windows, a row in the middle of a long chunk is seen by
no later row of it, but its keys and values are what others find.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from kvlab.engine.runner import Runner
    from kvlab.schedule import Chunk, Step


class RowCheck:
    """Looks at the hidden states of a runner's steps: one reduction, read back where the step's tokens are."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._launched: tuple[Step, Tensor | None] | None = None

    def launch(self, step: Step) -> None:
        """Queues the reduction over [T, hidden] behind the step's forward; a step of decodes needs none."""
        hidden = self._runner.hidden
        needed = hidden is not None and any(map(unseen_rows, step.chunks))
        # the largest of a row with a NaN is NaN; ten times as fast here as asking every value
        self._launched = step, hidden.abs().amax(-1).isfinite() if needed else None

    def spoiled(self, step: Step) -> frozenset[str]:
        """The requests whose chunk has a row that is not finite, beside those that are sampled from."""
        if self._launched is None or self._launched[0] is not step:
            self.launch(step)
        assert self._launched
        (_, finite), self._launched = self._launched, None
        return frozenset() if finite is None else spoiled_requests(step, finite.cpu().numpy())


def spoiled_requests(step: Step, finite: np.ndarray) -> frozenset[str]:
    """The requests of `step` with a row that is not `finite` bool [T], beside those that are sampled from."""
    found, row = set(), 0
    for chunk in step.chunks:
        if not finite[row : row + unseen_rows(chunk)].all():
            found.add(chunk.request.request_id)
        row += chunk.count
    return frozenset(found)


def unseen_rows(chunk: Chunk) -> int:
    """The first rows of a chunk, from which nobody samples: all but the last known token's and the drafts'."""
    return chunk.count - len(chunk.drafts) - chunk.samples
