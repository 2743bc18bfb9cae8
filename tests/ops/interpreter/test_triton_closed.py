"""The decode kernels over closed groups and their recent window, interpreted, against a loop over tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from paged import drawn, pairwise, shuffled_table
from tolerances import assert_close

from kvlab.ops.attention import paged_attention, triton_, triton_grouped
from kvlab.ops.batch import AttentionBatch, make_batch
from kvlab.ops.grouped_views import GroupedViews
from kvlab.ops.views import page_views, part_views
from kvlab.quant import kivi
from kvlab.specs.formats import get_format
from kvlab.specs.grouped import grouped
from kvlab.specs.layout import page_layout
from kvlab.specs.parts import Attention

TOKENS = 8  # of a group
OPTIONS = {
    "fmt": ["kivi4", "kivi2"],
    "dims": [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128), (20, 12)],
    "heads": [(2, 2), (5, 1), (14, 2), (17, 1)],
    "recent": [0, 5, 16],
    "entries": [1, 2, 3],
    "split": [512, 32, 16],
    "window": [0, 7, 25],
    "softcap": [0.0, 1.5],
    "sinks": [False, True],
    "alibi": [False, True],
    "query": ["fp32", "bf16", "fp16"],
    "lens": [[1], [8, 7, 9], [40, 0, 33], [61, 24, 5]],
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": "fp32", "bf16": "bf16 cut", "fp16": "fp16 products"}


@dataclass
class Closed:
    """Sequences in closed groups and a recent window, everything else NaN; `keys`, `values` as a query reads them."""

    views: GroupedViews
    batch: AttentionBatch
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def fill(case: dict) -> Closed:
    """Every group is encoded alone, every recent token written alone, without the operation under test."""
    (_, heads), dims, lens = case["heads"], case["dims"], case["lens"]
    fmt = replace(get_format(case["fmt"]), group_tokens=TOKENS, recent=case["recent"], group_values=8)
    part, window = grouped(Attention(heads, *dims, get_format("fp32")), 0, fmt)
    generator = torch.Generator().manual_seed(0)
    sizes = {"closed": TOKENS * case["entries"], "recent": 4}
    tables = {name: shuffled_table(lens, size, generator) for name, size in sizes.items()}
    layouts = page_layout(part, case["entries"]), page_layout(window, sizes["recent"])
    pools = [
        torch.full((int(t.max()) + 2, layout.page_bytes), 255, dtype=torch.uint8)
        for t, layout in zip(tables.values(), layouts, strict=True)
    ]
    closed, recent = part_views(pools[0], layouts[0]), page_views(pools[1], layouts[1])
    keys, values = [], []
    for b, n in enumerate(lens):
        rows = [torch.randn(n, heads, d, generator=generator) for d in dims]
        end = max(0, (n - fmt.recent) // TOKENS) * TOKENS
        for i in range(end // TOKENS):
            own = slice(i * TOKENS, (i + 1) * TOKENS)
            stored = kivi.encode(*(x[None, own].transpose(1, 2) for x in rows), part)
            page = int(tables["closed"][b, i // case["entries"]])
            for name, new in stored.items():
                closed[name][page, :, i % case["entries"]] = new[0]
            for x, back in zip(rows, kivi.decode(stored, part), strict=True):
                x[own] = back[0].transpose(0, 1)
        for t in range(end, n):
            page = int(tables["recent"][b, t // 4])
            recent.k[page, :, t % 4], recent.v[page, :, t % 4] = rows[0][t], rows[1][t]
        tables["recent"][b, : end // 4] = 0  # the window gave them back
        keys.append(rows[0].double())
        values.append(rows[1].double())
    batch = replace(make_batch([1] * len(lens), lens, tables["recent"], 4), closed=tables["closed"])
    return Closed(GroupedViews(part, closed, recent), batch, keys, values)


def oracle(query: torch.Tensor, closed: Closed, options: dict) -> torch.Tensor:
    """Attention of the last token of each sequence, head by head, in fp64."""
    out = torch.zeros(*query.shape[:2], closed.views.value_dim, dtype=torch.float64)
    for b, (key, value) in enumerate(zip(closed.keys, closed.values, strict=True)):
        n = len(key)
        low = max(0, n - options["window"]) if options["window"] else 0
        for h in range(query.shape[1] if n else 0):
            kv = h * key.shape[1] // query.shape[1]
            scores = key[low:, kv] @ query[b, h].double() * options["scale"]
            if options["softcap"]:
                scores = options["softcap"] * torch.tanh(scores / options["softcap"])
            if options["alibi"] is not None:
                scores += options["alibi"][h].double() * (torch.arange(low, n) - n + 1)
            powers = (scores - scores.max()).exp()
            sink = options["sinks"]
            total = powers.sum() + (0 if sink is None else (sink[h].double() - scores.max()).exp())
            out[b, h] = powers / total @ value[low:, kv]
    return out


def check(case: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_, "SPLIT", case["split"])
    monkeypatch.setattr(triton_grouped, "TILE", 2 * TOKENS)
    closed, (num_heads, _) = fill(case), case["heads"]
    query = torch.randn(len(case["lens"]), num_heads, case["dims"][0]).to(TYPES[case["query"]])
    options = {"scale": 2 * case["dims"][0] ** -0.5, "window": case["window"], "softcap": case["softcap"]}
    options |= {k: torch.randn(num_heads) if case[k] else None for k in ("sinks", "alibi")}
    assert triton_grouped.supports(query, closed.views)
    # the groups are there already: nothing may be closed again
    monkeypatch.setattr("kvlab.ops.attention.grouped.close_groups", lambda views, batch: None)
    out = paged_attention(query, closed.views, closed.batch, **options)
    assert_close(str(case), oracle(query, closed, options), out, TOLERANCE[case["query"]])


def case_id(case: dict) -> str:
    return "-".join(str(v).replace(" ", "") for v in case.values())


@pytest.mark.parametrize("case", pairwise(OPTIONS), ids=case_id)
def test_every_two_options_together(case: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", drawn(OPTIONS, ("fmt", "dims", "entries", "recent")), ids=case_id)
def test_the_product(case: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, monkeypatch)


def test_keys_before_rotation_and_odd_widths_are_torchs() -> None:
    case = {name: values[0] for name, values in OPTIONS.items()} | {"lens": [20]}
    views, query = fill(case).views, torch.randn(1, 2, 64)
    assert triton_grouped.supports(query, views)
    assert not triton_grouped.supports(query, replace(views, turn=lambda key, position, back: key))
    assert not triton_grouped.supports(query, fill(case | {"fmt": "kivi2", "dims": (18, 12)}).views)
