"""Token and byte counts as people write them."""

from __future__ import annotations

import pytest

from kvlab.specs.units import gb, gib, human_bytes, parse_bytes, parse_tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("32k", 32_768), ("32K", 32_768), ("1M", 1_048_576), ("4096", 4096), ("1.5k", 1536), (7, 7), ("1_000", 1000),
     ("131,072", 131_072), ("1,048,576", 2**20), (".5k", 512), (" 8 k ", 8192)],
)  # fmt: skip
def test_k_is_1024_tokens_and_plain_numbers_are_taken_as_they_are(text: str | int, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "-1", "0", "0k", "1.0001k", "0.5", "32kb", "1e3", "32 k tokens", "nan",
                                  "1,5k", "8,19", "1,0000", ",500", "1000,000"])  # fmt: skip
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(ValueError, match=r"^tokens ") as error:
        parse_tokens(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("2GiB", 2**31), ("2GB", 2 * 10**9), ("512MiB", 2**29), ("1.5 GB", 1_500_000_000), ("100", 100), ("1kB", 1000),
     ("1KiB", 1024), ("0.5TiB", 2**39)],
)  # fmt: skip
def test_gb_and_gib_are_not_the_same(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["2 gigabytes", "0GB", "-1GiB", "0.3B", "GiB"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(ValueError, match=r"^bytes "):
        parse_bytes(text)


def test_printed_with_their_unit() -> None:
    assert gib(2**31) == "2.00 GiB" and gb(2**31) == "2.15 GB"
    assert [human_bytes(n) for n in (1023, 1024, 327_680, 10 * 2**30)] == [
        "1,023 B", "1.00 KiB", "320.00 KiB", "10.00 GiB",
    ]  # fmt: skip
