"""Every kernel against its reference on a device, at small sizes: what has to hold before anything is timed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvlab.ops.attention import paged_attention, triton_
from kvlab.ops.attention.grouped import close_groups
from kvlab.ops.batch import make_batch
from kvlab.ops.copy_pages import copy_pages
from kvlab.ops.gated_delta import DeltaRows, gated_delta
from kvlab.ops.grouped_views import GroupedViews
from kvlab.ops.mla_attention import mla_attention
from kvlab.ops.page_scores import page_scores
from kvlab.ops.rope import Angles
from kvlab.ops.selected_pages import selected_pages
from kvlab.ops.ssd import SSDRows, ssd
from kvlab.ops.tree import tree_mask
from kvlab.ops.views import PageViews, page_views, part_views
from kvlab.ops.write_kv import write_kv
from kvlab.ops.write_kv.triton_ import KINDS
from kvlab.quant.calibrate import scale_of
from kvlab.quant.fixed import FixedScales
from kvlab.specs.fixed_scales import FIXED
from kvlab.specs.formats import get_format
from kvlab.specs.grouped import grouped
from kvlab.specs.layout import page_layout
from kvlab.specs.parts import Attention, MLALatent

# largest error as a fraction of the reference's largest value: 16-bit products, summed in another order
LIMIT = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Operations run by this backend inside."""
    before = os.environ.get("KVLAB_OPS")
    os.environ["KVLAB_OPS"] = name
    try:
        yield
    finally:
        os.environ.pop("KVLAB_OPS")
        if before is not None:
            os.environ["KVLAB_OPS"] = before


def check(device: torch.device) -> dict[str, Any]:
    """{"errors": kernel and case -> error, "wrong": those over the limit}; a kernel that fails to run is wrong."""
    errors: dict[str, Any] = {}
    wrong: list[str] = []
    for name, run in cases(device).items():
        try:
            error, limit = run()
        except Exception as failure:  # one kernel that does not compile must not hide the others
            errors[name] = f"{type(failure).__name__}: {failure}"[:300]
            wrong.append(name)
            continue
        errors[name] = error
        if not error <= limit:
            wrong.append(name)
    return {"errors": errors, "wrong": wrong}


def cases(device: torch.device) -> dict[str, Callable[[], tuple[float, float]]]:
    """Every check by name."""
    found: dict[str, Callable[[], tuple[float, float]]] = {}
    for fmt in (*triton_.WHOLE, *triton_.PACKED):
        found[f"decode and prefill {fmt}"] = lambda fmt=fmt: _attention(device, fmt, (64, 64), {})
    for fmt in KINDS:
        found[f"cache write {fmt}"] = lambda fmt=fmt: _write(device, fmt)
    for dim in (80, 128, 256):
        found[f"decode and prefill {dim}"] = lambda dim=dim: _attention(device, "bf16", (dim, dim), {"window": 7})
    # groups that the border of the halves or the end cuts
    for fmt in ("nvfp4", "int4_g32", "int4_sym_g32", "int8_asym_g32"):
        found[f"decode and prefill 80 {fmt}"] = lambda fmt=fmt: _attention(device, fmt, (80, 80), {"window": 7})
    found["decode and prefill 192/128 mxfp4"] = lambda: _attention(device, "mxfp4", (192, 128), {})
    found["decode and prefill 192/128"] = lambda: _attention(device, "bf16", (192, 128), {"softcap": 20.0})
    vectors = {name: torch.linspace(-1, 1, 6, device=device).exp2() for name in ("sinks", "alibi")}
    for fmt in ("bf16", "int8", "int4"):
        found[f"prefill of a tree {fmt}"] = lambda fmt=fmt: _tree(device, fmt)
    for fmt in ("bf16", "int4"):
        for name, rules in {"sinks and a chunk": {"sinks": vectors["sinks"], "chunk": 16},
                            "slopes": {"alibi": vectors["alibi"]}}.items():  # fmt: skip
            found[f"decode and prefill with {name} {fmt}"] = lambda fmt=fmt, rules=rules: _attention(
                device, fmt, (64, 64), rules
            )
        found[f"decode in splits {fmt}"] = lambda fmt=fmt: _splits(device, fmt)
        for pairs in (False, True):
            name = f"cache write of turned {'pairs' if pairs else 'halves'} {fmt}"
            found[name] = lambda fmt=fmt, pairs=pairs: _write(device, fmt, pairs)
    for fmt in FIXED:
        found[f"cache write, decode and prefill {fmt} under scales from data"] = lambda fmt=fmt: _fixed(device, fmt)
    for fmt in ("kivi4", "kivi2"):
        found[f"decode over closed groups {fmt}"] = lambda fmt=fmt: _closed(device, fmt)
    for fmt in ("bf16", "fp8_e4m3"):
        found[f"absorbed decode {fmt}"] = lambda fmt=fmt: _mla(device, fmt)
    found["ssd"] = lambda: _ssd(device)
    found["gated delta"] = lambda: _delta(device)
    found["page scores, chosen pages"] = lambda: _chosen(device)
    found["copy pages"] = lambda: _copy(device)
    return found


def _both(run: Callable[[], Tensor], dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    """(error of the kernel, its limit): the operation by Triton and by its reference."""
    with forced("triton"):
        mine = run().double()
    with forced("reference"):
        expected = run().double()
    return float((mine - expected).abs().max() / expected.abs().max()), LIMIT[dtype]


def _pages(device: torch.device, part: Any, pages: int, size: int) -> tuple[Tensor, Any]:
    layout = page_layout(part, size)
    return torch.full((pages, layout.page_bytes), 255, dtype=torch.uint8, device=device), layout


def _filled(device: torch.device, fmt: str, dims: tuple[int, int]) -> tuple[PageViews, Tensor]:
    """Pages that hold sequences of 20 and 40 tokens, and their block table."""
    buffer, layout = _pages(device, Attention(2, *dims, get_format(fmt)), 9, 16)
    views = page_views(buffer, layout)
    table = torch.tensor([[5, 2, 0], [7, 1, 3]], dtype=torch.int32, device=device)
    rows = [torch.randn(60, 2, n, device=device) for n in dims]
    write_kv(*rows, views, make_batch([20, 40], [20, 40], table, 16).slot_mapping)
    return views, table


def _query(device: torch.device, rows: int, dim: int) -> Tensor:
    return torch.randn(rows, 6, dim, device=device).to(torch.bfloat16 if device.type == "cuda" else torch.float32)


def _attention(device: torch.device, fmt: str, dims: tuple[int, int], rules: dict[str, Any]) -> tuple[float, float]:
    views, table = _filled(device, fmt, dims)
    query, batch = _query(device, 8, dims[0]), make_batch([1, 7], [20, 40], table, 16)
    return _both(lambda: paged_attention(query, views, batch, scale=dims[0] ** -0.5, **rules), query.dtype)


def _tree(device: torch.device, fmt: str) -> tuple[float, float]:
    """A chunk whose last six tokens are drafts on three branches, and one without drafts."""
    views, table = _filled(device, fmt, (64, 64))
    batch = replace(make_batch([3, 8], [20, 40], table, 16), tree=tree_mask([[], [-1, 0, 0, 1, 1, 2]], device))
    query = _query(device, 11, 64)
    return _both(lambda: paged_attention(query, views, batch, scale=0.2, softcap=9.0), query.dtype)


def _splits(device: torch.device, fmt: str) -> tuple[float, float]:
    """A decode of three splits, the last of which has one token, beside one that has nothing in two of them."""
    length, pages = 2 * triton_.SPLIT + 1, 2 * triton_.SPLIT // 16 + 1
    buffer, layout = _pages(device, Attention(2, 64, 64, get_format(fmt)), pages + 2, 16)
    views, own = page_views(buffer, layout), torch.randperm(pages + 1, device=device).to(torch.int32) + 1
    table = torch.stack((own[:pages], torch.cat((own[pages:], own.new_zeros(pages - 1)))))
    rows = [torch.randn(length + 9, 2, 64, device=device) for _ in range(2)]
    write_kv(*rows, views, make_batch([length, 9], [length, 9], table, 16).slot_mapping)
    query, batch = _query(device, 2, 64), make_batch([1, 1], [length, 9], table, 16)
    sinks = torch.linspace(-1, 1, 6, device=device)
    return _both(lambda: paged_attention(query, views, batch, scale=0.2, sinks=sinks), query.dtype)


def _fixed(device: torch.device, fmt: str) -> tuple[float, float]:
    """One scale for each head's channel, found from other rows: codes as the host's, and what attention makes of them."""
    rows = [torch.randn(60, 2, 64) * torch.linspace(0.2, 9, 64) for _ in range(2)]
    scales = [scale_of(x[:40], "channel", fmt) for x in rows]
    table, found = torch.tensor([[5, 2, 0], [7, 1, 3]], dtype=torch.int32), []
    for place, name in ((device, "triton"), (torch.device("cpu"), "reference")):
        buffer, layout = _pages(place, Attention(2, 64, 64, get_format(fmt)), 9, 16)
        views = replace(page_views(buffer, layout), fixed=FixedScales(*(x.to(place) for x in scales)))
        with forced(name):
            slots = make_batch([20, 40], [20, 40], table.to(place), 16).slot_mapping
            write_kv(*(x.to(place) for x in rows), views, slots)
        found.append(views)
    assert torch.equal(found[0].buffer.cpu(), found[1].buffer), "other bytes than the host's encoder writes"
    query, batch = _query(device, 8, 64), make_batch([1, 7], [20, 40], table.to(device), 16)
    return _both(lambda: paged_attention(query, found[0], batch, scale=0.02), query.dtype)


def _write(device: torch.device, fmt: str, pairs: bool | None = None) -> tuple[float, float]:
    """Share of bytes that the kernel writes otherwise than the host's encoder; sums of turned rows may round otherwise.

    Args:
        pairs: keys are turned before, in interleaved pairs or halves, by quarters, which round nothing; None: they are not.
    """
    rows, positions = [torch.randn(7, 3, n).bfloat16() for n in (128, 80)], torch.tensor([0, 8, 3, 5, 1, 7, 2])
    turns, quarter = torch.randint(0, 4, (9, 48)), torch.tensor([1.0, 0.0, -1.0, 0.0])
    tables = quarter[turns], quarter[(turns + 3) % 4]
    slots, found = torch.tensor([4, -1, 11, 23, 9, 0, 17]), []
    for place, name in ((device, "triton"), (torch.device("cpu"), "reference")):
        buffer, layout = _pages(place, Attention(3, 128, 80, get_format(fmt)), 4, 7)
        angles = None if pairs is None else Angles(*(x.to(place) for x in (*tables, positions)), pairs)
        with forced(name):
            write_kv(*(x.to(place) for x in rows), page_views(buffer, layout), slots.to(place), angles)
        found.append(buffer.cpu())
    return float((found[0] != found[1]).double().mean()), 0.01 if fmt.endswith("_had") else 0.0


def _closed(device: torch.device, fmt: str) -> tuple[float, float]:
    part, window = grouped(Attention(2, 64, 64, get_format("bf16")), 0, get_format(fmt))
    tokens, length = part.format.group_tokens, 200  # two groups are closed, 136 tokens are not
    tables = [torch.randperm(7, device=device).to(torch.int32)[None] + 1 for _ in range(2)]
    pools = [part_views(*_pages(device, one, 8, size)) for one, size in ((part, 1), (window, tokens))]
    views = GroupedViews(part, *pools)
    whole, last = (replace(make_batch([n], [length], tables[1], tokens), closed=tables[0]) for n in (length, 1))
    rows = [torch.randn(length, 2, 64, device=device) for _ in range(2)]
    write_kv(*rows, views.recent, whole.slot_mapping)
    close_groups(views, whole)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query = torch.randn(1, 6, 64, device=device).to(dtype)
    return _both(lambda: paged_attention(query, views, last, scale=0.2), torch.bfloat16)


def _mla(device: torch.device, fmt: str) -> tuple[float, float]:
    """A decode of two splits beside one of five tokens."""
    length, pages = triton_.SPLIT + 9, triton_.SPLIT // 16 + 1
    buffer, layout = _pages(device, MLALatent(512, 64, get_format(fmt)), pages + 2, 16)
    views = part_views(buffer, layout)
    for name in ("latent", "rope"):
        views[name].copy_(torch.randn(views[name].shape, device=device))
    own = torch.randperm(pages + 1, device=device).to(torch.int32) + 1
    batch = make_batch([1, 1], [length, 5], torch.stack((own[:pages], own[pages:].expand(pages))), 16)
    query, up = torch.randn(2, 4, 128 + 64, device=device), torch.randn(4, 128 + 128, 512, device=device) / 20
    return _both(lambda: mla_attention(query, up, views, batch, scale=0.07), torch.bfloat16)


def _states(device: torch.device) -> Any:
    return make_batch([1, 1], [9, 1], torch.tensor([[2], [1]], dtype=torch.int32, device=device), 1000)


def _ssd(device: torch.device) -> tuple[float, float]:
    batch, start = _states(device), torch.randn(3, 4 * 64 * 32, device=device)
    x, dt = torch.randn(2, 4, 64, device=device), torch.rand(2, 4, device=device)
    rows = SSDRows(x, dt, torch.randn(2, 2, 32, device=device), torch.randn(2, 2, 32, device=device))
    decay = -torch.rand(4, device=device)

    def run() -> Tensor:
        states = start.clone()
        return torch.cat((ssd(rows, decay, states, batch).flatten(), states[1:].flatten()))

    return _both(run)


def _delta(device: torch.device) -> tuple[float, float]:
    batch, start = _states(device), torch.randn(3, 4 * 32 * 64, device=device)
    keys = [torch.nn.functional.normalize(torch.randn(2, 2, 32, device=device), dim=-1) for _ in range(2)]
    values, decay = torch.randn(2, 4, 64, device=device), -torch.rand(2, 4, 1, device=device)
    rows = DeltaRows(*keys, values, decay, torch.rand(2, 4, device=device))

    def run() -> Tensor:
        states = start.clone()
        return torch.cat((gated_delta(rows, states, batch, scale=0.2).flatten(), states[1:].flatten()))

    return _both(run)


def _chosen(device: torch.device) -> tuple[float, float]:
    buffer, layout = _pages(device, Attention(2, 64, 64, get_format("fp32")), 5, 4)
    views = page_views(buffer, layout)
    batch = make_batch([1], [15], torch.tensor([[4, 1, 3, 2]], dtype=torch.int32, device=device), 4)
    whole = make_batch([15], [15], batch.block_table, 4)
    rows = torch.randn(15, 2, 64, device=device)
    write_kv(rows, rows, views, whole.slot_mapping)
    query = torch.randn(1, 4, 64, device=device)
    bounds = torch.randn(5, 2, 64, device=device), torch.randn(5, 2, 64, device=device)
    chosen = torch.tensor([[[3, 0], [1, -1]]], dtype=torch.int32, device=device)

    def run() -> Tensor:
        scores = page_scores(query, bounds, batch, 4)
        return torch.cat((scores.flatten(), selected_pages(query, views, batch, chosen, scale=0.1).flatten()))

    return _both(run)


def _copy(device: torch.device) -> tuple[float, float]:
    source = torch.randint(0, 255, (4, 4096), dtype=torch.uint8, device=device)
    pairs = torch.tensor([[3, 0], [1, 2]], device=device)

    def run() -> Tensor:
        target = torch.zeros_like(source)
        copy_pages(source, target, pairs)
        return target

    return _both(run)[0], 0.0
