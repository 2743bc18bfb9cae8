"""Sequences in pages, without a scheduler: what parity and small tests drive a decoder with.

Every page starts as NaN, pages lie in random order, and pages that a window has left behind are taken out of the
table. What is read although it should not be shows as NaN.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kvlab.models.load import LoadedModel
from kvlab.ops.batch import AttentionBatch, make_batch
from kvlab.ops.views import PageViews, SegmentViews, part_views
from kvlab.specs.layout import Group, group_parts
from kvlab.specs.pages import PAGED_RULES, cdiv, dead_pages


class PagedSequences:
    """A fixed number of sequences of at most `max_len` tokens, each with its pages from the start.

    Attributes:
        block_size: tokens per page, rounded up to whole compressed entries.
        lengths: tokens of each sequence that are in the cache.
    """

    def __init__(self, model: LoadedModel, num_seqs: int, max_len: int, *, block_size: int = 4, seed: int = 0) -> None:
        strides = [p.retention.size for _, p in model.spec.parts() if p.retention.rule == "stride"]
        whole = math.lcm(*strides)
        self.model, self.block_size = model, (block_size := cdiv(block_size, whole) * whole)
        self.lengths = [0] * num_seqs
        self._groups = group_parts(model.spec, block_size)
        width = cdiv(max_len, block_size)
        # of a state a sequence has one page, whatever its length
        widths = [1 if g.retention.rule == "state" else width for g in self._groups]
        self._tables = [_shuffled_tables(num_seqs, w, seed + i) for i, w in enumerate(widths)]
        self._views = self._pool([1 + num_seqs * w for w in widths])

    def _pool(self, num_pages: list[int]) -> list[tuple[PageViews | SegmentViews | None, ...]]:
        views: dict[tuple[int, int], PageViews | SegmentViews] = {}
        for group, pages in zip(self._groups, num_pages, strict=True):
            for member, layout in zip(group.members, group.layouts, strict=True):
                # all bits set is NaN in every float type
                buffer = torch.full((pages, layout.page_bytes), 255, dtype=torch.uint8, device=self.model.device)
                views[member] = part_views(buffer, layout)
        return [tuple(views.get((x.index, i)) for i in range(len(x.parts))) for x in self.model.spec.layers]

    def reset(self, seq: int) -> None:
        """Forgets a sequence; its pages keep their bytes."""
        self.lengths[seq] = 0

    def forget(self, array: str) -> None:
        """Zeroes the state array of that name in all pages of all layers."""
        for views in (v for layer in self._views for v in layer):
            if isinstance(views, SegmentViews) and array in views.segments:
                views[array].zero_()

    def step(
        self, work: dict[int, Sequence[int]], padded_rows: int = 0, *, last_only: bool = False
    ) -> dict[int, Tensor]:
        """Logits [tokens, vocab] of each sequence after running `work`: sequence -> its next token ids.

        With `last_only` logits [1, vocab], of each sequence's last token. `padded_rows` rows that belong to no
        sequence are appended to the batch.
        """
        order = sorted(work, key=lambda seq: (len(work[seq]) != 1, seq))
        counts = [len(work[seq]) for seq in order]
        for seq, count in zip(order, counts, strict=True):
            self.lengths[seq] += count
        batches = [
            self._batch(group, table, order, counts, padded_rows)
            for group, table in zip(self._groups, self._tables, strict=True)
        ]
        ids = [token for seq in order for token in work[seq]] + [0] * padded_rows
        ends = torch.tensor(list(accumulate(counts)), device=self.model.device)
        inputs = torch.tensor(ids, device=self.model.device)
        logits = self.model.decoder.forward(inputs, batches, self._views, ends - 1 if last_only else None)
        pieces = logits.split(1) if last_only else logits[: sum(counts)].split(counts)
        return dict(zip(order, pieces, strict=True))

    def _batch(
        self, group: Group, table: Tensor, order: list[int], counts: list[int], padded_rows: int
    ) -> AttentionBatch:
        rows = table[order].clone()
        ends = [self.lengths[seq] for seq in order]
        if group.retention.rule in PAGED_RULES:
            for row, seq, count in zip(rows, order, counts, strict=True):
                dead = dead_pages(group.retention, self.block_size, self.lengths[seq] - count)
                row[dead.start : dead.stop] = 0
        size = max(self.lengths) + 1 if group.retention.rule == "state" else self.block_size
        return make_batch(counts, ends, rows.to(self.model.device), size, padded_rows)


def _shuffled_tables(num_seqs: int, width: int, seed: int) -> Tensor:
    """int32 [num_seqs, width]: every page from 1 on once, in random order."""
    pages = list(range(1, 1 + num_seqs * width))
    random.Random(seed).shuffle(pages)
    return torch.tensor(pages, dtype=torch.int32).view(num_seqs, width)
