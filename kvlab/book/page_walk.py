"""What an attention kernel does for one query and one head, page by page: the table, one page, running sums, the next.

The same arithmetic as the kernels in `kvlab.ops.attention`, in plain steps that can be shown; a chapter compares the
two. Nothing but the table says where a page lies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvlab.ops.batch import AttentionBatch, make_batch
from kvlab.ops.views import PageViews, part_views
from kvlab.ops.write_kv import write_kv
from kvlab.specs.formats import get_format
from kvlab.specs.layout import page_layout
from kvlab.specs.pages import cdiv
from kvlab.specs.parts import Attention


@dataclass(frozen=True)
class Visit:
    """One page on the way.

    Attributes:
        entry: index in the block table. page: what stands there. tokens: positions read.
        best: the highest score so far. total: sum of exp(score - best) so far.
    """

    entry: int
    page: int
    tokens: range
    best: float
    total: float


def walk(
    query: torch.Tensor, views: PageViews, table: Sequence[int], length: int, scale: float, head: int = 0
) -> tuple[list[Visit], torch.Tensor]:
    """The visits of one query, [D], that sees `length` tokens, and its output, [Dv].

    Each page's keys and values are read once: when a higher score appears, what was summed before is scaled down.
    """
    visits, best, total = [], -math.inf, 0.0
    summed = query.new_zeros(views.value_dim)
    for entry in range(cdiv(length, views.block_size)):
        page, start = table[entry], entry * views.block_size
        count = min(views.block_size, length - start)
        scores = views.k[page, head, :count].to(query.dtype) @ query * scale
        higher = max(best, float(scores.max()))
        shrink, weights = math.exp(best - higher), (scores - higher).exp()
        total = total * shrink + float(weights.sum())
        summed = summed * shrink + weights @ views.v[page, head, :count].to(query.dtype)
        best = higher
        visits.append(Visit(entry, page, range(start, start + count), best, total))
    return visits, summed / total


Example = tuple[torch.Tensor, PageViews, AttentionBatch]


def example(table: Sequence[int], length: int, block_size: int, head_dim: int, seed: int = 0) -> Example:
    """A query [1, 1, D], pages that hold `length` random tokens where `table` says, and the decode batch over them.

    All other pages hold NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    layout = page_layout(Attention(1, head_dim, head_dim, get_format("fp32")), block_size)
    views = part_views(torch.full((max(table) + 1, layout.page_bytes), 255, dtype=torch.uint8), layout)
    key, value = (torch.randn(length, 1, head_dim, generator=generator) for _ in range(2))
    slots = [table[p // block_size] * block_size + p % block_size for p in range(length)]
    write_kv(key, value, views, torch.tensor(slots))
    batch = make_batch([1], [length], torch.tensor([list(table)], dtype=torch.int32), block_size)
    return torch.randn(1, 1, head_dim, generator=generator), views, batch
