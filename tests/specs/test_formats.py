"""Storage formats: codes, metadata and real bits per value."""

from __future__ import annotations

import pytest

from kvlab.specs.formats import FORMATS, align, get_format


# name, bytes of a row of 128 values: codes, metadata; and of 80 values
@pytest.mark.parametrize(
    ("name", "row128", "row80"),
    [
        ("fp32", (512, 0), (320, 0)),
        ("bf16", (256, 0), (160, 0)),
        ("fp16", (256, 0), (160, 0)),
        ("fp8_e4m3", (128, 0), (80, 0)),
        ("fp8_e5m2", (128, 0), (80, 0)),
        ("int8", (128, 4), (80, 4)),
        ("int4", (64, 4), (40, 4)),
        ("int8_g32", (128, 8), (80, 6)),
        ("int8_asym_g32", (128, 16), (80, 12)),
        ("int4_g32", (64, 16), (40, 12)),
        ("int4_sym_g32", (64, 8), (40, 6)),
        ("nvfp4", (64, 8), (40, 5)),
        ("mxfp4", (64, 4), (40, 3)),
    ],
)
def test_row_bytes(name: str, row128: tuple[int, int], row80: tuple[int, int]) -> None:
    fmt = get_format(name)
    for width, (codes, meta) in ((128, row128), (80, row80)):
        assert (fmt.code_bytes(width), fmt.meta_bytes(width)) == (codes, meta)
        assert fmt.row_bytes(width) == codes + meta


def test_real_bits_are_more_than_nominal_ones() -> None:
    assert get_format("int8").bits_per_value(128) == 8.25
    assert get_format("int8").bits_per_value(64) == 8.5
    assert get_format("int4").bits_per_value(128) == 4.25
    assert get_format("nvfp4").bits_per_value(128) == 4.5
    assert get_format("mxfp4").bits_per_value(128) == 4.25


def test_an_odd_row_of_4_bit_codes_takes_a_whole_last_byte() -> None:
    assert get_format("int4").code_bytes(7) == 4


@pytest.mark.parametrize(
    ("alias", "name"), [("bfloat16", "bf16"), ("torch.float16", "fp16"), ("fp8", "fp8_e4m3"), ("FP8_E4M3", "fp8_e4m3")]
)
def test_aliases(alias: str, name: str) -> None:
    assert get_format(alias) is FORMATS[name]


def test_an_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"dtype 'fp7': must be one of .*fp32, bf16, fp16, fp8_e4m3"):
        get_format("fp7")


def test_align() -> None:
    assert [align(n) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]
