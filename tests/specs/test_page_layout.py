"""Where exactly each array of a page lies, and which parts share a block table."""

from __future__ import annotations

import pytest

from kvlab.specs import catalogue
from kvlab.specs.families import from_config
from kvlab.specs.formats import get_format
from kvlab.specs.layout import group_parts, page_layout
from kvlab.specs.parts import Attention, MLALatent

BF16 = get_format("bf16")


def places(part: object, block_size: int) -> list[tuple[str, int, int]]:
    """(name, offset, bytes from row to row) of every segment, then the end of the page."""
    layout = page_layout(part, block_size)  # type: ignore[arg-type]
    return [*((s.name, s.offset, s.row_bytes) for s in layout.segments), ("end", layout.page_bytes, 0)]


def test_grouped_query_attention_in_bf16() -> None:
    assert places(Attention(8, 128, 128, BF16), 16) == [("k", 0, 256), ("v", 32_768, 256), ("end", 65_536, 0)]


def test_int8_has_all_codes_first_then_one_fp32_scale_per_token_and_head() -> None:
    part = Attention(8, 128, 128, get_format("int8"))
    assert places(part, 16) == [
        ("k", 0, 128), ("v", 16_384, 128), ("k_scale", 32_768, 4), ("v_scale", 33_280, 4), ("end", 33_792, 0),
    ]  # fmt: skip
    assert page_layout(part, 16)["k_scale"].width == 1


def test_latent_attention() -> None:
    assert places(MLALatent(512, 64, BF16), 64) == [("latent", 0, 1024), ("rope", 65_536, 128), ("end", 73_728, 0)]


def test_heads_of_80_need_no_padding_in_bf16_and_fp8() -> None:
    assert places(Attention(32, 80, 80, BF16), 16) == [("k", 0, 160), ("v", 81_920, 160), ("end", 163_840, 0)]
    assert page_layout(Attention(32, 80, 80, get_format("fp8")), 16).padding_bytes == 0


def test_fp8_rows_of_72_are_padded_to_80_and_the_padding_is_counted() -> None:
    part = Attention(3, 72, 72, get_format("fp8"))
    assert places(part, 16) == [("k", 0, 80), ("v", 3840, 80), ("end", 7680, 0)]
    assert page_layout(part, 16).padding_bytes == 2 * 3 * 16 * 8


def test_int4_rows_of_80_are_40_bytes_in_48() -> None:
    part = Attention(1, 80, 80, get_format("int4"))
    assert places(part, 16) == [
        ("k", 0, 48), ("v", 768, 48), ("k_scale", 1536, 4), ("v_scale", 1600, 4), ("end", 1664, 0),
    ]  # fmt: skip


def test_scales_of_few_tokens_leave_a_gap_before_the_next_segment() -> None:
    # 3 tokens x 1 head x 4 B = 12 B of scales: the next segment starts at the next multiple of 16
    part = Attention(1, 64, 64, get_format("int8"))
    assert places(part, 3)[2:] == [("k_scale", 384, 4), ("v_scale", 400, 4), ("end", 416, 0)]


def test_keys_and_values_of_different_widths() -> None:
    assert places(Attention(2, 192, 128, BF16), 16) == [("k", 0, 384), ("v", 12_288, 256), ("end", 20_480, 0)]


# groups


def groups(name: str, block_size: int) -> list[tuple[str, int, int]]:
    """(name, parts, bytes of one page id) of each group of catalogue model `name`."""
    model = from_config(catalogue.get(name))
    return [(g.name, len(g.members), g.block_bytes) for g in group_parts(model, block_size)]


def test_windows_get_a_table_of_their_own() -> None:
    assert groups("gemma-3-270m", 16) == [("full", 3, 3 * 16_384), ("sliding512", 15, 15 * 16_384)]


def test_width_is_a_property_of_the_layer_not_of_the_group() -> None:
    # full layers: 1 head of 512; sliding ones: 1 of 256; shared layers are in no group
    assert groups("gemma-4-e2b", 16) == [("full", 3, 3 * 32_768), ("sliding512", 12, 12 * 16_384)]


def test_index_keys_share_the_table_of_the_latents() -> None:
    assert groups("deepseek-v3.2", 64) == [("full", 122, 61 * 64 * (1152 + 256))]


def test_states_come_last() -> None:
    assert [g[:2] for g in groups("falcon-h1-7b", 16)] == [("full", 44), ("state", 44)]


def test_compressed_entries_have_one_table_per_ratio() -> None:
    found = groups("deepseek-v4-pro", 128)
    assert [g[:2] for g in found] == [("sliding128", 61), ("compressed4", 60), ("compressed128", 31), ("state", 61)]
    assert found[1][2] == 30 * 32 * (1024 + 256)  # 32 entries per page: 512 wide, and their index keys
    assert found[2][2] == 31 * 1 * 1024


def test_a_page_must_hold_whole_entries() -> None:
    model = from_config(catalogue.get("deepseek-v4-pro"))
    with pytest.raises(ValueError, match="block_size 16: must be a multiple of 128"):
        group_parts(model, 16)
    with pytest.raises(ValueError, match="block_size 0: must be a positive number of tokens"):
        group_parts(model, 0)
