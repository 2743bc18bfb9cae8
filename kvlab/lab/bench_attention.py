"""Decode attention over pages against contiguous memory, and pages of 8 and 4 bits against fp32: ratios from one run.

All layers take their turn, so that no keys are found in a cache: the working set is at least four times the last-level
cache. Every repetition times every side once, one after the other; a ratio is the median of the repetitions' ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvlab.lab.record import provenance
from kvlab.ops.attention import paged_attention
from kvlab.ops.batch import AttentionBatch, make_batch
from kvlab.ops.views import PageViews, page_views
from kvlab.ops.write_kv import write_kv
from kvlab.specs.formats import get_format
from kvlab.specs.layout import page_layout
from kvlab.specs.parts import Attention

HEADS, KV_HEADS, DIM, LAYERS, PAGE = 9, 3, 64, 30, 16  # SmolLM2-135M
SIDES = ("contiguous", "fp32", "int8", "int4")
LENGTHS = (64, 256, 1024, 4096, 16384, 32768)
LOADS = {f"{n} x {b}": (n,) * b for b in (1, 8) for n in LENGTHS} | {"4096 and 32768": (4096,) * 4 + (32768,)}
MEMORY = 3 * 2**30  # bytes that one side may hold
CACHE_TIMES = 4


@dataclass(frozen=True)
class Load:
    """Sequences that decode one token each.

    Attributes:
        name: "tokens x sequences", or a mix. lens: tokens of each sequence.
        layers: how many take their turn. working_set: bytes of their fp32 keys and values.
    """

    name: str
    lens: tuple[int, ...]
    layers: int
    working_set: int


def last_level_cache() -> int:
    """Bytes of the largest cache that the system reports for the first processor; 32 MiB where it reports none."""
    units = {"K": 2**10, "M": 2**20}
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(s[:-1]) * units[s[-1]] for s in sizes if s[-1] in units), default=32 * 2**20)


def plan_load(name: str, lens: tuple[int, ...], cache: int) -> Load | None:
    """The load with as many layers as the model has, more where they would fit the cache, fewer where memory ends;
    None where that leaves less than four times the cache."""
    layer = sum(lens) * KV_HEADS * DIM * 2 * 4
    layers = min(max(LAYERS, -(-CACHE_TIMES * cache // layer)), max(1, MEMORY // layer))
    return Load(name, lens, layers, layers * layer) if layers * layer >= CACHE_TIMES * cache else None


def pages_of(fmt: str, lens: Sequence[int], layers: int) -> tuple[list[PageViews], AttentionBatch]:
    """Each layer's pages of random rows, scattered over its pool, and the batch that decodes over them."""
    counts = [-(-n // PAGE) for n in lens]
    order = (torch.randperm(sum(counts)) + 1).to(torch.int32).split(counts)
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    for row, pages in zip(table, order, strict=True):
        row[: len(pages)] = pages
    layout = page_layout(Attention(KV_HEADS, DIM, DIM, get_format(fmt)), PAGE)
    first = torch.zeros((sum(counts) + 1, layout.page_bytes), dtype=torch.uint8)
    for i, n in enumerate(lens):
        rows = torch.randn(n, KV_HEADS, DIM)
        write_kv(
            rows, rows.flip(0), page_views(first, layout), make_batch([n], [n], table[i : i + 1], PAGE).slot_mapping
        )
    views = [page_views(first if i == 0 else first.clone(), layout) for i in range(layers)]
    return views, make_batch([1] * len(lens), list(lens), table, PAGE)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grouped: bool = False) -> torch.Tensor:
    """Attention of one token per sequence, [B, Hq, D], over contiguous keys and values [B, Hkv, n, D], by torch.

    Args:
        grouped: give torch the query heads of a KV head as rows of one head, as our kernel takes them; else it is called
            with `enable_gqa`, as models call it.
    """
    if grouped:
        rows = query.unflatten(1, (key.shape[1], -1))
        return scaled_dot_product_attention(rows, key, value, scale=DIM**-0.5).flatten(1, 2)
    return scaled_dot_product_attention(query[:, :, None], key, value, scale=DIM**-0.5, enable_gqa=True)[:, :, 0]


def contiguous(lens: Sequence[int], layers: int, grouped: bool = False) -> Callable[[torch.Tensor], None]:
    """All layers' attention over contiguous keys and values; a mix of lengths is a call per length."""
    groups = [(n, lens.count(n), lens.index(n)) for n in dict.fromkeys(lens)]
    rows = [tuple(torch.randn(b, KV_HEADS, n, DIM) for _ in range(2)) for n, b, _ in groups]
    copies = [[(k.clone(), v.clone()) for k, v in rows] for _ in range(layers)]

    def run(query: torch.Tensor) -> None:
        for layer in copies:
            for (_, b, at), (key, value) in zip(groups, layer, strict=True):
                attend(query[at : at + b], key, value, grouped)

    return run


def side(name: str, load: Load) -> Callable[[torch.Tensor], None]:
    """What one side does for a step: attention of every layer."""
    if name == "contiguous":
        return contiguous(load.lens, load.layers)
    return over_pages(*pages_of(name, load.lens, load.layers))


def over_pages(views: Sequence[PageViews], batch: AttentionBatch) -> Callable[[torch.Tensor], None]:
    """All layers' attention over pages, by our kernel."""

    def run(query: torch.Tensor) -> None:
        for layer in views:
            paged_attention(query, layer, batch, scale=DIM**-0.5)

    return run


def in_order(batch: AttentionBatch) -> AttentionBatch:
    """The batch of one sequence whose table names the same pages in the order in which they lie."""
    return make_batch([1], batch.seq_lens.tolist(), batch.block_table.sort(dim=1).values, PAGE)


def timed(
    sides: dict[str, Callable[[torch.Tensor], None]], query: torch.Tensor, repeats: int
) -> dict[str, list[float]]:
    """Seconds of each side in each repetition; all sides take their turn in every one."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, run in sides.items():
            start = time.perf_counter()
            run(query)
            if repeat:  # the first one warms up: it compiles and touches memory
                times[name].append(time.perf_counter() - start)
    return times


def ratio(times: dict[str, list[float]], of: str, to: str) -> float:
    """Median over the repetitions of one side's time over another's."""
    return statistics.median(a / b for a, b in zip(times[of], times[to], strict=True))


@torch.inference_mode()
def apart(tokens: int = 16_384, repeats: int = 5) -> dict[str, float]:
    """What order and kernel do to the time of one sequence, each alone: ratios from one run.

    Returns:
        "scattered": our kernel over pages in random order, over the same pages in the order in which they lie.
        "ungrouped": torch's kernel as models call it, over the same kernel given its rows as ours takes them.
        "ours": our kernel over pages in random order, over that.
    """
    layer = tokens * KV_HEADS * DIM * 2 * 4
    layers = min(-(-CACHE_TIMES * last_level_cache() // layer), max(1, MEMORY // layer))
    views, batch = pages_of("fp32", (tokens,), layers)
    sides = {"scattered": over_pages(views, batch), "in order": over_pages(views, in_order(batch)),
             "ungrouped": contiguous((tokens,), layers), "grouped": contiguous((tokens,), layers, grouped=True)}  # fmt: skip
    times = timed(sides, torch.randn(1, HEADS, DIM), repeats)
    return {"scattered": ratio(times, "scattered", "in order"), "ungrouped": ratio(times, "ungrouped", "grouped"),
            "ours": ratio(times, "scattered", "grouped")}  # fmt: skip


@torch.inference_mode()
def measure(load: Load, repeats: int) -> dict[str, Any]:
    """One row: milliseconds a layer of each side (medians), and the ratios."""
    query = torch.randn(len(load.lens), HEADS, DIM)
    times = timed({name: side(name, load) for name in SIDES}, query, repeats)
    return {
        "load": load.name,
        "sequences": len(load.lens),
        "tokens": sum(load.lens),
        "layers": load.layers,
        "working_set_bytes": load.working_set,
        "ms_a_layer": {name: statistics.median(found) / load.layers * 1e3 for name, found in times.items()},
        "paged_over_contiguous": ratio(times, "fp32", "contiguous"),
        "int8_speed": ratio(times, "fp32", "int8"),
        "int4_speed": ratio(times, "fp32", "int4"),
    }


def run_bench(repeats: int = 7, only: Sequence[str] = ()) -> dict[str, Any]:
    """The record of all loads, or those in `only`.

    Raises:
        ValueError: an unknown load, or no repetitions.
    """
    if repeats < 1:
        raise ValueError(f"repeats {repeats}: must be at least 1")
    if unknown := [name for name in only if name not in LOADS]:
        raise ValueError(f"only {', '.join(unknown)}: must be among {'; '.join(LOADS)}")
    cache, rows, skipped = last_level_cache(), [], []
    for name, lens in LOADS.items():
        if not only or name in only:
            load = plan_load(name, lens, cache)
            rows.append(measure(load, repeats)) if load else skipped.append(name)
    record = provenance("kvlab bench attention --json")
    what = "decode attention of one layer: pages over contiguous memory, 8- and 4-bit pages against fp32 pages"
    shape = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "block_size": PAGE}
    return record | {
        "what": what, "shape": shape, "threads": torch.get_num_threads(), "last_level_cache_bytes": cache,
        "repeats": repeats, "rows": rows, "skipped": skipped,
    }  # fmt: skip


def report(record: dict[str, Any]) -> str:
    """The record as a table."""
    lines = [
        f"working sets are at least {CACHE_TIMES} x the last-level cache of {record['last_level_cache_bytes'] / 2**20:.0f} MiB",
        f"{'tokens x sequences':>18} {'layers':>6} {'set MiB':>8} {'paged/contiguous':>16} {'int8 speed':>10} {'int4 speed':>10}",
    ]
    lines += [
        f"{r['load']:>18} {r['layers']:6} {r['working_set_bytes'] / 2**20:8.0f} {r['paged_over_contiguous']:16.2f} "
        f"{r['int8_speed']:10.2f} {r['int4_speed']:10.2f}"
        for r in record["rows"]
    ]
    return "\n".join(lines)
