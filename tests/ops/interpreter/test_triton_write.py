"""The write kernel: the same bytes as the reference, nothing written elsewhere."""

from __future__ import annotations

import pytest
import torch
from paged import pairwise, poisoned_views

from kvlab.ops.rope.reference import rope
from kvlab.ops.write_kv import reference, triton_, write_kv

OPTIONS = {
    "fmt": list(triton_.KINDS),
    "dims": [(64, 64), (80, 80), (112, 112), (192, 128), (20, 12)],
    "heads": [1, 3, 17],
    "block_size": [16, 1, 7],
    "half": [0, 4, 10],
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
        angles, turned = triton_.Angles(cos, sin, positions), rope(key, cos, sin, positions)
    triton_.write_kv(key, value, written, slots, angles)
    reference.write_kv(turned, value, expected, slots)
    assert torch.equal(numbers(written), numbers(expected))


def numbers(views) -> torch.Tensor:
    """The bytes of the pages; zero of either sign and NaN of any bits are one."""
    if views.format == "fp8_e4m3":
        return torch.cat((views.k.float().flatten(), views.v.float().flatten())).nan_to_num(12345.0) + 0.0
    if views.format == "int8":
        return views.buffer
    return views.buffer.view(views.k.dtype).nan_to_num(12345.0) + 0.0


def test_angles_that_are_not_exact() -> None:
    written, expected = poisoned_views("fp32", 2, 64, 16, 3), poisoned_views("fp32", 2, 64, 16, 3)
    key, value = torch.randn(5, 2, 64), torch.randn(5, 2, 64)
    angle = torch.rand(10, 32) * 6
    slots, positions = torch.tensor(SLOTS), torch.tensor([0, 3, 9, 2, 7])
    triton_.write_kv(key, value, written, slots, triton_.Angles(angle.cos(), angle.sin(), positions))
    reference.write_kv(rope(key, angle.cos(), angle.sin(), positions), value, expected, slots)
    torch.testing.assert_close(written.k, expected.k, rtol=0, atol=1e-6, equal_nan=True)
    assert torch.equal(written.v.nan_to_num(7.0), expected.v.nan_to_num(7.0))


def test_a_format_without_a_kernel_is_written_by_torch() -> None:
    written, expected = poisoned_views("int3_had", 2, 64, 16, 3), poisoned_views("int3_had", 2, 64, 16, 3)
    key, value, slots = torch.randn(5, 2, 64), torch.randn(5, 2, 64), torch.tensor(SLOTS)
    write_kv(key, value, written, slots)
    reference.write_kv(key, value, expected, slots)
    assert torch.equal(written.buffer[1:], expected.buffer[1:])
    with pytest.raises(ValueError, match="kv dtype 'int3_had': the write kernel stores"):
        triton_.write_launch(key, value, written, slots, None)
