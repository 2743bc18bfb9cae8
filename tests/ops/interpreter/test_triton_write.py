"""The write kernel: the same bytes as the reference, nothing written elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged import pairwise, poisoned_views

from kvlab.ops.rope.reference import rope
from kvlab.ops.write_kv import reference, triton_, write_kv
from kvlab.quant import get_codec, row_formats
from kvlab.quant.calibrate import LARGEST, SHARES, scale_of
from kvlab.quant.fixed import FixedScales
from kvlab.quant.packing import unpack

OPTIONS = {
    "fmt": list(triton_.KINDS),
    "dims": [(64, 96), (80, 112), (128, 256), (192, 128), (20, 12)],  # of keys and values, which are written apart
    "heads": [1, 3, 17],
    "block_size": [16, 1, 7],
    "half": [0, 4, 10],
    "pairs": [False, True],
    "values": ["random", "special"],
}
SLOTS = [4, -1, 11, 23, 9]


def special(rows: torch.Tensor) -> torch.Tensor:
    """Rows with infinity and NaN, of zeros, of powers of two down to subnormal codes, beyond fp8."""
    rows[0, 0, :4] = torch.tensor([0.0, float("inf"), float("nan"), 449.0])
    rows[2] = 0
    rows[3] = 2.0 ** -torch.arange(rows.shape[2])
    rows[4] *= 1000
    return rows


@pytest.mark.parametrize("case", pairwise(OPTIONS), ids=lambda c: "-".join(map(str, c.values())))
def test_pages_hold_the_bytes_of_the_reference(case: dict) -> None:
    (head_dim, width), half = case["dims"], case["half"]
    written, expected = (
        poisoned_views(case["fmt"], case["heads"], head_dim, case["block_size"], 25, width) for _ in range(2)
    )
    key, value = torch.randn(5, case["heads"], head_dim), torch.randn(5, case["heads"], width)
    if case["values"] == "special":
        key, value = special(key), special(value)
    if case["fmt"] == "bf16":  # the interpreter cuts fp32 to bf16: start from what needs no rounding
        key, value = (torch.exp2(torch.randint(-9, 9, x.shape)).float() for x in (key, value))
    slots, positions = torch.tensor(SLOTS), torch.tensor([0, 3, 9, 2, 7])
    angles, turned = None, key
    if half:
        # turns by a quarter and a half are exact in every format
        turns = torch.randint(0, 4, (10, half))
        cos, sin = torch.tensor([1.0, 0.0, -1.0, 0.0])[turns], torch.tensor([0.0, 1.0, 0.0, -1.0])[turns]
        angles = triton_.Angles(cos, sin, positions, case["pairs"])
        turned = rope(key, cos, sin, positions, case["pairs"])
    triton_.write_kv(key, value, written, slots, angles)
    reference.write_kv(turned, value, expected, slots)
    if case["fmt"].endswith("_had"):
        assert_close_codes(written, expected)
    else:
        assert torch.equal(numbers(written), numbers(expected))
    if case["values"] == "random" and not half and not case["fmt"].endswith("_had"):
        assert torch.equal(written.buffer, expected.buffer)


def numbers(views) -> torch.Tensor:
    """What the pages hold; zero of either sign and NaN of any bits are one, a scale of NaN makes its codes so."""
    codec, found = get_codec(views.format), []
    for name, width in (("k", views.key_dim), ("v", views.value_dim)):
        codes, meta = getattr(views, name), getattr(views, f"{name}_scale")
        found += [codec.decode(codes, meta, width).float(), *([] if meta is None else [meta.float()])]
    return torch.cat([x.flatten() for x in found]).nan_to_num(12345.0) + 0.0


def assert_close_codes(written, expected) -> None:
    """Rows that were turned: the kernel sums in another order, so a code may be the next one, a scale off by rounding."""
    bits = triton_.KINDS[written.format][1]
    for name, width in (("k", written.key_dim), ("v", written.value_dim)):
        codes = [unpack(getattr(views, name), bits, width).int() for views in (written, expected)]
        assert (codes[0] - codes[1]).abs().max() <= 1
        scales = [getattr(views, f"{name}_scale") for views in (written, expected)]
        torch.testing.assert_close(*scales, rtol=2e-3 if bits == 3 else 3e-6, atol=2e-3, equal_nan=True)


@pytest.mark.parametrize("fmt", ["int4_had", "int3_had"])
@pytest.mark.parametrize("width", [64, 80, 20])
def test_turned_rows_whose_sums_are_exact_have_the_same_bytes(fmt: str, width: int) -> None:
    """Whole numbers, and a factor that is a power of two: no order of summing rounds."""
    written, expected = (poisoned_views(fmt, 3, width, 7, 5) for _ in range(2))
    key, value = (torch.randint(-99, 100, (5, 3, width)).float() for _ in range(2))
    triton_.write_kv(key, value, written, torch.tensor(SLOTS))
    reference.write_kv(key, value, expected, torch.tensor(SLOTS))
    assert torch.equal(written.buffer, expected.buffer)


@pytest.mark.parametrize("share", list(SHARES))
@pytest.mark.parametrize("fmt", list(LARGEST))
def test_scales_that_were_found_from_data_divide_the_rows(fmt: str, share: str) -> None:
    rows = torch.randn(40, 3, 20) * 9, torch.randn(40, 3, 12)
    fixed = FixedScales(*(scale_of(x, share, fmt) for x in rows))
    written, expected = (replace(poisoned_views(fmt, 3, 20, 7, 5, 12), fixed=fixed) for _ in range(2))
    key, value, slots = rows[0][:5], rows[1][:5], torch.tensor(SLOTS)
    write_kv(key, value, written, slots)
    reference.write_kv(key, value, expected, slots)
    assert torch.equal(numbers(written), numbers(expected))
    reference.write_kv(key, value, plain := poisoned_views(fmt, 3, 20, 7, 5, 12), slots)
    assert not torch.equal(numbers(written), numbers(plain)), "the scales must change the codes"


@pytest.mark.parametrize("pairs", [False, True])
def test_angles_that_are_not_exact(pairs: bool) -> None:
    written, expected = poisoned_views("fp32", 2, 64, 16, 3), poisoned_views("fp32", 2, 64, 16, 3)
    key, value = torch.randn(5, 2, 64), torch.randn(5, 2, 64)
    angle = torch.rand(10, 32) * 6
    slots, positions = torch.tensor(SLOTS), torch.tensor([0, 3, 9, 2, 7])
    triton_.write_kv(key, value, written, slots, triton_.Angles(angle.cos(), angle.sin(), positions, pairs))
    reference.write_kv(rope(key, angle.cos(), angle.sin(), positions, pairs), value, expected, slots)
    torch.testing.assert_close(written.k, expected.k, rtol=0, atol=1e-6, equal_nan=True)
    assert torch.equal(written.v.nan_to_num(7.0), expected.v.nan_to_num(7.0))


def test_every_format_of_rows_has_a_kernel_but_fp64() -> None:
    assert set(row_formats()) - set(triton_.KINDS) == {"fp64"}
    views, slots = poisoned_views("fp64", 2, 64, 16, 3), torch.tensor(SLOTS)
    key, value = torch.randn(5, 2, 64), torch.randn(5, 2, 64)
    write_kv(key, value, views, slots)
    assert torch.equal(views.k[0, :, 4], key[0].double())
    with pytest.raises(ValueError, match="kv dtype 'fp64': the write kernel stores"):
        triton_.write_launch(key, value, views, slots, None)
