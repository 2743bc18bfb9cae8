"""write_kv: what was asked for is written, and not one byte more."""

from __future__ import annotations

import mmap

import pytest
import torch
from paged import poisoned_views

from kvlab.ops import numba_support
from kvlab.ops.attention import paged_attention
from kvlab.ops.batch import make_batch
from kvlab.ops.rope import Angles, rope
from kvlab.ops.views import page_views
from kvlab.ops.write_kv import turns_keys, write_kv
from kvlab.quant import get_codec, row_formats
from kvlab.specs.formats import get_format
from kvlab.specs.layout import page_layout
from kvlab.specs.parts import Attention

BACKENDS = ["reference", "torch", "cpu"]
FORMATS = [name for name in row_formats() if name != "fp64"]


def use(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    if backend == "cpu" and not numba_support.available():
        pytest.skip("Numba is not installed")
    monkeypatch.setenv("KVLAB_OPS", backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("widths", [(64, 64), (20, 20), (24, 17)], ids=str)
def test_rows_land_in_their_slots_and_nowhere_else(backend: str, fmt: str, widths, monkeypatch) -> None:
    use(monkeypatch, backend)
    views = poisoned_views(fmt, 3, widths[0], 5, pages=6, value_dim=widths[1])
    slots = torch.tensor([4 * 5 + 4, -1, 2 * 5 + 0, 5 * 5 + 3, -1])
    key, value = torch.randn(5, 3, widths[0]), torch.randn(5, 3, widths[1])
    write_kv(key, value, views, slots)
    touched = torch.zeros(6, 5, dtype=torch.bool)
    for t, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, 5)
        touched[page, offset] = True
        for rows, codes, scales in ((key, views.k, views.k_scale), (value, views.v, views.v_scale)):
            expected, width = get_codec(fmt).encode(rows[t]), rows.shape[-1]
            scale = None if scales is None else scales[page, :, offset]
            got = get_codec(fmt).decode(codes[page, :, offset], scale, width)
            assert torch.equal(got, get_codec(fmt).decode(*expected, width))
    # every other byte of the pool, padding included, still is 255
    expected_bytes = torch.full_like(views.buffer, 255)
    mine = page_views(expected_bytes, views.layout)
    for page, offset in touched.nonzero().tolist():
        for a, b in (
            (mine.k, views.k),
            (mine.v, views.v),
            (mine.k_scale, views.k_scale),
            (mine.v_scale, views.v_scale),
        ):
            if a is not None and b is not None:
                a[page, :, offset] = b[page, :, offset]
    assert torch.equal(expected_bytes, views.buffer)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fmt", ["fp32", "int8", "int8_g32"])
def test_keys_that_are_not_turned_yet_are_turned_first(backend: str, fmt: str, monkeypatch) -> None:
    """A part of a row turns; where no kernel does it in the same pass, the operation does."""
    use(monkeypatch, backend)
    key, value, angle = torch.randn(3, 2, 12), torch.randn(3, 2, 12), torch.randn(7, 4)
    positions, slots = torch.tensor([6, 0, 3]), torch.tensor([4, 5, 11])
    late, before = (poisoned_views(fmt, 2, 12, 4, pages=3) for _ in range(2))
    assert not turns_keys(key, late)
    write_kv(key, value, late, slots, Angles(angle.cos(), angle.sin(), positions))
    write_kv(rope(key, angle.cos(), angle.sin(), positions), value, before, slots)
    assert torch.equal(late.buffer, before.buffer)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_rows_as_a_fused_projection_gives_them(backend: str, monkeypatch) -> None:
    use(monkeypatch, backend)
    views = poisoned_views("fp32", 2, 8, 4, pages=3)
    fused = torch.randn(3, 8, 8)
    _, key, value = fused.split((4, 2, 2), dim=1)
    write_kv(key, value, views, torch.tensor([4, 5, 11]))
    assert torch.equal(views.k[2, :, 3], key[2]) and torch.equal(views.v[1, :, 1], value[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_pools_beyond_two_to_the_31_elements(backend: str, monkeypatch) -> None:
    """Products of ids and strides in int32 would wrap around. The pool is reserved; only two pages are touched."""
    use(monkeypatch, backend)
    layout = page_layout(Attention(2, 128, 128, get_format("fp8_e4m3")), 16)
    pages = 2**31 // layout.page_bytes + 9
    memory = mmap.mmap(-1, pages * layout.page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer = torch.frombuffer(memory, dtype=torch.uint8).view(pages, layout.page_bytes)
    views = page_views(buffer, layout)
    last = pages - 1
    assert last * layout.page_bytes > 2**31
    key, value = torch.full((2, 2, 2, 128), 2.0)
    value[1] = 4.0
    batch = make_batch([2], [2], torch.tensor([[last]], dtype=torch.int32), 16)
    write_kv(key, value, views, batch.slot_mapping)
    assert buffer[last].any() and not buffer[last - 2**31 // layout.page_bytes].any()
    out = paged_attention(torch.randn(2, 2, 128), views, batch, scale=0.1)
    assert torch.equal(out[0], torch.full((2, 128), 2.0)) and torch.equal(out[1], torch.full((2, 128), 3.0))
