"""KIVI and KVQuant-style groups: bytes, what shares a scale, levels, outliers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvlab.quant import kvquant
from kvlab.quant.closed import codec_of
from kvlab.quant.packing import unpack
from kvlab.specs.formats import get_format
from kvlab.specs.grouped import ClosedGroups, grouped
from kvlab.specs.parts import Attention

NAMES = ["kivi4", "kivi2", "kvquant3"]


def part_of(name: str, key: int = 64, value: int = 64) -> ClosedGroups:
    return grouped(Attention(2, key, value, get_format("bf16")), 0, get_format(name))[0]


def sample(part: ClosedGroups, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shape = (3, part.num_kv_heads, part.format.group_tokens)
    return torch.randn(*shape, part.key_width, generator=rng), torch.randn(*shape, part.value_width, generator=rng)


@pytest.mark.parametrize("widths", [(64, 64), (96, 80), (20, 20)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_group_takes_the_bytes_that_its_part_counts(name: str, widths: tuple[int, int]) -> None:
    part = part_of(name, *widths)
    stored = codec_of(part).encode(*sample(part), part)
    assert sum(t.shape[-1] * t.element_size() * part.num_kv_heads for t in stored.values()) == part.entry_bytes
    key, value = codec_of(part).decode(stored, part)
    assert key.shape == sample(part)[0].shape and value.shape == sample(part)[1].shape


def test_real_bits_per_value_of_kivi_are_the_papers() -> None:
    """2 bits and an fp16 pair per 32: 3 bits; the recent window apart."""
    part = part_of("kivi2", 128, 128)
    assert 8 * part.entry_bytes / (2 * 2 * 128 * 32) == 3.0
    assert 8 * part_of("kivi4", 128, 128).entry_bytes / (2 * 2 * 128 * 32) == 5.0


def test_a_large_channel_of_keys_harms_no_other_channel() -> None:
    part = part_of("kivi4")
    key, value = sample(part)
    before, _ = codec_of(part).decode(codec_of(part).encode(key, value, part), part)
    key[..., 5] *= 100
    after, _ = codec_of(part).decode(codec_of(part).encode(key, value, part), part)
    others = torch.arange(64) != 5
    assert torch.equal(before[..., others], after[..., others])


def test_a_large_token_of_values_harms_no_other_token() -> None:
    part = part_of("kivi4")
    key, value = sample(part)
    before = codec_of(part).decode(codec_of(part).encode(key, value, part), part)[1]
    value[:, :, 7] *= 100
    after = codec_of(part).decode(codec_of(part).encode(key, value, part), part)[1]
    others = torch.arange(32) != 7
    assert torch.equal(before[:, :, others], after[:, :, others])


@pytest.mark.parametrize(
    ("bits", "half"),
    [
        (2, [0.4528, 1.510]),
        (3, [0.2451, 0.7560, 1.344, 2.152]),
        (4, [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]),
    ],
)
def test_levels_are_the_published_ones(bits: int, half: list[float]) -> None:
    """J. Max 1960, table 1."""
    got = kvquant.levels(bits)
    assert got[2 ** (bits - 1) :] == pytest.approx(half, abs=6e-4)
    assert got == pytest.approx([-x for x in reversed(got)], abs=1e-6)


def test_kvquant_uses_every_level_and_keeps_one_value_in_a_hundred() -> None:
    part = part_of("kvquant3")
    key, value = sample(part)
    key[0, 0, 3, 9] = 50.0
    stored = kvquant.encode(key, value, part)
    assert len(unpack(stored["k_closed"], 3, 64 * 32).unique()) == 8
    assert part.outliers == (21, 21)  # 1% of 2,048, rounded up
    back, _ = kvquant.decode(stored, part)
    assert back[0, 0, 3, 9] == 50.0
    none = replace(part, format=replace(part.format, outliers=1))
    few, _ = kvquant.decode(kvquant.encode(key, value, none), none)
    assert (back - key).square().mean() < (few - key).square().mean()


@pytest.mark.parametrize("name", NAMES)
def test_a_group_with_nan_is_not_read_as_numbers(name: str) -> None:
    part = part_of(name)
    key, value = sample(part)
    key[1, 0, 4, 2] = torch.nan
    back, _ = codec_of(part).decode(codec_of(part).encode(key, value, part), part)
    assert back[1, 0, 4, 2].isnan() and back[0].isfinite().all() and back[2].isfinite().all()
