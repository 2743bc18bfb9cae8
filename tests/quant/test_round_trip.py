"""Storage formats: bounds on the round trip, and what NaN, infinity and zeros become."""

from __future__ import annotations

import pytest
import torch

from kvlab.quant import get_codec


@pytest.mark.parametrize("head_dim", [64, 128, 20])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("tokens", [7, 42])
def test_int8_is_off_by_at_most_half_a_step(head_dim: int, heads: int, tokens: int) -> None:
    x = torch.randn(tokens, heads, head_dim, generator=torch.Generator().manual_seed(tokens))
    x *= 10.0 ** torch.arange(-3, 4).repeat(tokens)[:tokens, None, None]
    codec = get_codec("int8")
    codes, scale = codec.encode(x)
    assert codes.dtype == torch.int8 and scale.shape == (tokens, heads, 1)
    error = (codec.decode(codes, scale) - x).abs()
    assert (error <= scale * 0.5001).all()
    # the largest value of a row uses the last code
    assert (codes.abs().amax(-1) == 127).all()
    for _ in range(20):
        again, scale_again = codec.encode(x)
        assert torch.equal(again, codes) and torch.equal(scale_again, scale)


@pytest.mark.parametrize("fmt", ["fp64", "fp32", "bf16", "fp16", "fp8_e4m3", "int8"])
def test_a_row_of_zeros_stays_zeros(fmt: str) -> None:
    codec = get_codec(fmt)
    assert torch.equal(codec.decode(*codec.encode(torch.zeros(2, 3, 16))).double(), torch.zeros(2, 3, 16).double())


@pytest.mark.parametrize("fmt", ["fp64", "fp32", "bf16", "fp16", "fp8_e4m3", "int8"])
def test_nan_does_not_become_a_number(fmt: str) -> None:
    codec = get_codec(fmt)
    x = torch.ones(2, 16)
    x[0, 3] = torch.nan
    back = codec.decode(*codec.encode(x))
    assert torch.isnan(back[0, 3]) and torch.equal(back[1].double(), torch.ones(16).double())


def test_int8_tiny_and_infinite_rows() -> None:
    codec = get_codec("int8")
    tiny = torch.full((1, 16), 1e-42)
    assert torch.isfinite(codec.decode(*codec.encode(tiny))).all()
    assert (codec.decode(*codec.encode(tiny)) - tiny).abs().max() <= codec.encode(tiny)[1].max() / 2
    assert torch.isnan(codec.decode(*codec.encode(torch.full((1, 16), torch.inf)))).all()


def test_fp8_is_clamped_and_off_by_at_most_a_sixteenth() -> None:
    codec = get_codec("fp8_e4m3")
    big = torch.tensor([449.0, 500.0, 1e9, -1e9, 448.0])
    assert codec.decode(*codec.encode(big)).tolist() == [448, 448, 448, -448, 448]
    x = torch.logspace(-1.8, 2.65, 4001)  # 2**-6 .. 446
    assert ((codec.decode(*codec.encode(x)) - x).abs() <= x / 16).all()


def test_fp8_decodes_all_256_codes_as_its_definition_says() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    got = get_codec("fp8_e4m3").decode(codes.view(torch.float8_e4m3fn), None)
    for code, value in enumerate(got.tolist()):
        sign, exponent, mantissa = -1 if code & 128 else 1, code >> 3 & 15, code & 7
        if exponent == 15 and mantissa == 7:
            assert value != value
        elif exponent == 0:
            assert value == sign * mantissa / 8 * 2.0**-6
        else:
            assert value == sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


@pytest.mark.parametrize(("fmt", "step"), [("bf16", 2.0**-9), ("fp16", 2.0**-12)])
def test_plain_formats_round_to_nearest(fmt: str, step: float) -> None:
    x = torch.randn(1000).abs() + 0.1
    codec = get_codec(fmt)
    assert ((codec.decode(*codec.encode(x)) - x).abs() <= x * step * 1.0001 * 2).all()


def test_an_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="kv dtype 'int3': the engine stores fp64, fp32"):
        get_codec("int3")
