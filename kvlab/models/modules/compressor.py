"""Compressed entries of DeepSeek-V4: windows of tokens become one row each, normed and rotated to where they began."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.models.facts import NormFacts, RopeFacts, fact
from kvlab.models.modules.base import StepContext, WholeContext
from kvlab.models.modules.mla import turn
from kvlab.models.modules.norm import Norm
from kvlab.models.modules.norm import reference as norm_reference
from kvlab.models.rope import inverse_frequencies, rope_tables
from kvlab.models.weights import Names, Scope
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.compress import compress, entry_slots
from kvlab.ops.compress.reference import pooled
from kvlab.ops.linear import linear
from kvlab.ops.views import SegmentViews
from kvlab.ops.write_rows import write_rows

Part = tuple[SegmentViews, AttentionBatch]


@dataclass(frozen=True)
class CompressorFacts:
    """How tokens become entries.

    Attributes:
        ratio: tokens per entry. dim: values of an entry.
        overlap: whether an entry also reads the window before its own, through a second series of values.
        rope: of an entry's last `rope_dim` values, at the position of its window's first token.
    """

    ratio: int
    dim: int
    rope_dim: int
    overlap: bool = False
    rope: RopeFacts | None = fact("off", None)  # noqa: RUF009
    norm: NormFacts = NormFacts()  # noqa: RUF009

    @property
    def width(self) -> int:
        """Values that a token adds to its window."""
        return self.dim * (2 if self.overlap else 1)


class Compressor:
    """Writes the entries of the windows that a step closes.

    Args:
        names: (segment of the entries, prefix of the open buffers' arrays).
    """

    def __init__(self, facts: CompressorFacts, scope: Scope, hidden: int, names: tuple[str, str]) -> None:
        f = self.facts = facts
        self.segment, self.prefix = names
        self.rows = scope.take_rows("kv_gate.weight", {"kv_proj.weight": f.width, "gate_proj.weight": f.width}, hidden)
        self.bias = scope.take("position_bias", f.ratio, f.width)
        self.norm = Norm(f.norm, scope, "kv_norm", f.dim)

    def __call__(self, x: Tensor, step: StepContext, entries: Part, buffer: Part) -> None:
        """Takes in `x` [T, hidden]; writes to the pages of `entries` and `buffer`."""
        f = self.facts
        kv, gate = linear(x, self.rows).chunk(2, dim=-1)
        closed = compress(
            (kv, gate), self.bias, *buffer, ratio=f.ratio, overlap=f.overlap, prefix=self.prefix
        )  # fmt: skip
        rows = self.norm(closed.entries.to(x.dtype))
        if f.rope is not None and len(rows):
            angles = step.rotary.angles(closed.window * f.ratio, f.rope, f.rope_dim)
            rows = turn(rows[:, None], angles, f.rope)[:, 0]
        views, batch = entries
        write_rows({self.segment: rows}, views, entry_slots(closed, batch, views.block_size))


def reference(f: CompressorFacts, w: Names, x: Tensor, whole: WholeContext) -> Tensor:
    """All entries [T // ratio, dim] of a whole sequence [T, hidden], one window after the other, in plain torch."""
    kv, gate = w.linear("kv_proj", x), w.linear("gate_proj", x)
    found = []
    for i in range(len(x) // f.ratio):
        here, last = (slice(j * f.ratio, (j + 1) * f.ratio) for j in (i, i - 1))
        before = (kv[last, : f.dim], gate[last, : f.dim]) if f.overlap and i else None
        found.append(pooled(kv[here], gate[here], w["position_bias"], before, f.dim))
    if not found:
        return x.new_zeros(0, f.dim)
    rows = norm_reference(f.norm, w, "kv_norm", torch.stack(found))
    if f.rope is None:
        return rows
    starts = torch.arange(len(found)) * f.ratio
    frequencies = inverse_frequencies(f.rope, f.rope_dim, x.dtype, whole.max_len)
    angles = rope_tables(starts, frequencies, x.dtype, f.rope.attention_factor)
    return turn(rows[:, None], angles, f.rope)[:, 0]
