"""Latent attention both ways: from how many queries on expanding heads beats staying in the latent space, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvlab.ops.mla_attention import absorbed, expanded
from kvlab.ops.mla_attention.rule import crossover, operations
from kvlab.ops.views import SegmentViews, part_views
from kvlab.specs.formats import get_format
from kvlab.specs.layout import page_layout
from kvlab.specs.parts import MLALatent

COUNTS = (1, 4, 16, 64, 128, 256, 512)
BLOCK_SIZE = 64


@dataclass(frozen=True)
class Shape:
    """The widths of a latent attention; the defaults are DeepSeek's, with fewer heads."""

    heads: int = 4
    plain_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    latent_dim: int = 512


@dataclass(frozen=True)
class Row:
    """A chunk of `queries` that ends at `context` tokens.

    Attributes:
        time_ratio: time in the latent space over time with heads expanded, both medians of one run.
        operation_ratio: the same of the operations that differ (`kvlab.ops.mla_attention.rule`).
    """

    queries: int
    time_ratio: float
    operation_ratio: float


@dataclass(frozen=True)
class MlaBench:
    """What `bench_mla` found.

    Attributes:
        context: tokens. counted: queries from which on expanding takes fewer operations. measured: the fewest tried
            queries from which on it took less time each time; None where it never did.
    """

    context: int
    rows: tuple[Row, ...]
    counted: int | None
    measured: int | None


def bench_mla(
    context: int = 2048, counts: Sequence[int] = COUNTS, *, shape: Shape | None = None, repeats: int = 5
) -> MlaBench:
    """Both ways in turn on the same pages, fp32.

    Raises:
        ValueError: more queries than context.
    """
    shape = shape or Shape()
    if max(counts) > context:
        raise ValueError(f"counts up to {max(counts)}: a chunk cannot be longer than the context of {context} tokens")
    views, table = _pages(shape, context)
    expanded_rows = shape.plain_dim + shape.value_dim
    up = torch.randn(shape.heads, expanded_rows, shape.latent_dim) * shape.latent_dim**-0.5
    rows = []
    for count in counts:
        query = torch.randn(count, shape.heads, shape.plain_dim + shape.rope_dim)
        ways = [
            lambda way=way, query=query: way.chunk(query, up, views, (table, context), 0.07)
            for way in (absorbed, expanded)
        ]
        times = _medians(ways, repeats)
        counted = operations(count, context, shape.latent_dim, expanded_rows)
        rows.append(Row(count, times[0] / times[1], counted[0] / counted[1]))
    faster = [row.queries for row in rows if all(r.time_ratio > 1 for r in rows if r.queries >= row.queries)]
    counted_at = crossover(context, shape.latent_dim, expanded_rows)
    return MlaBench(context, tuple(rows), counted_at, min(faster, default=None))


def _pages(shape: Shape, context: int) -> tuple[SegmentViews, torch.Tensor]:
    layout = page_layout(MLALatent(shape.latent_dim, shape.rope_dim, get_format("fp32")), BLOCK_SIZE)
    pages = -(-context // BLOCK_SIZE)
    views = part_views(torch.zeros(pages + 1, layout.page_bytes, dtype=torch.uint8), layout)
    assert isinstance(views, SegmentViews)
    for rows in views.segments.values():
        rows.normal_()
    return views, torch.randperm(pages).to(torch.int32) + 1


def _medians(ways: Sequence[Callable[[], torch.Tensor]], repeats: int) -> list[float]:
    """Seconds of each way, the median of `repeats` runs after one that is not counted; ways take turns."""
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(repeats + 1):
        for way, found in zip(ways, times, strict=True):
            start = time.perf_counter()
            way()
            if turn:
                found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in times]


def show(bench: MlaBench) -> str:
    """The result as a table of text, at most 80 columns."""
    lines = [f"latent attention, {bench.context} tokens of context: latent space over expanded heads"]
    lines += [f"{'queries':>8}{'time':>10}{'operations':>14}"]
    lines += [f"{r.queries:>8}{r.time_ratio:>9.2f}x{r.operation_ratio:>13.2f}x" for r in bench.rows]
    lines.append(f"expanding pays from {bench.counted} queries on by operations, from {bench.measured} by this clock")
    return "\n".join(lines)
