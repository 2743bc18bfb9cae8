"""A pool of latents full of NaN with some sequences in it, and attention over them as a loop: the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from paged import shuffled_table

from kvlab.ops.batch import AttentionBatch, make_batch
from kvlab.ops.views import SegmentViews, part_views
from kvlab.specs.formats import get_format
from kvlab.specs.layout import page_layout
from kvlab.specs.parts import CacheSpec, MLALatent


@dataclass
class LatentPages:
    """Sequences in pages, and the same rows as plain tensors, fp64.

    Attributes:
        rows: per sequence, segment name -> [seq_len, width].
    """

    views: SegmentViews
    batch: AttentionBatch
    rows: list[dict[str, torch.Tensor]]


def poisoned(part: CacheSpec, block_size: int, pages: int) -> SegmentViews:
    """Views of a pool of that part in which every byte is 255."""
    layout = page_layout(part, block_size)
    return part_views(torch.full((pages, layout.page_bytes), 255, dtype=torch.uint8), layout)


def fill(
    widths: tuple[int, int, int], lens: tuple[list[int], list[int]], padded_rows: int = 0, fmt: str = "fp64"
) -> LatentPages:
    """Random latents stored one value at a time, without the operation under test.

    Args:
        widths: (C, R, block_size). lens: (query_lens, seq_lens).
    """
    latent, rope, block_size = widths
    generator = torch.Generator().manual_seed(3)
    table = shuffled_table(lens[1], block_size, generator)
    views = poisoned(MLALatent(latent, rope, get_format(fmt)), block_size, int(table.max()) + 2)
    rows = []
    for b, n in enumerate(lens[1]):
        stored = {}
        for name, width in (("latent", latent), ("rope", rope)):
            values = torch.randn(n, width, generator=generator, dtype=torch.float64)
            for t in range(n):
                views[name][int(table[b, t // block_size]), 0, t % block_size] = values[t].to(views[name].dtype)
            stored[name] = values.to(views[name].dtype).double()
        rows.append(stored)
    return LatentPages(views, make_batch(*lens, table, block_size, padded_rows), rows)


def oracle(
    query: torch.Tensor, up: torch.Tensor, paged: LatentPages, scale: float, chosen: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention [T, H, V] in fp64, keys and values of every head written out, one query and head after the other."""
    rotated = paged.views["rope"].shape[-1]
    plain = query.shape[2] - rotated
    out = torch.zeros(*query.shape[:2], up.shape[1] - plain, dtype=torch.float64)
    starts = paged.batch.query_start_loc.tolist()
    for b, rows in enumerate(paged.rows):
        for row in range(starts[b], starts[b + 1]):
            seen = list(range(len(rows["latent"]) - (starts[b + 1] - row) + 1))
            if chosen is not None:
                seen = [s for s in chosen[row].tolist() if s >= 0]
            for h in range(query.shape[1]):
                expanded = rows["latent"][seen] @ up[h].double().T
                keys = torch.cat((expanded[:, :plain], rows["rope"][seen]), dim=1)
                weights = (keys @ query[row, h].double() * scale).softmax(0)
                out[row, h] = weights @ expanded[:, plain:]
    return out
