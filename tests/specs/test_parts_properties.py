"""What holds for every part, whatever its numbers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.specs.formats import FORMATS, get_format
from kvlab.specs.layout import page_layout
from kvlab.specs.parts import (
    Attention,
    CacheSpec,
    ChunkedLocal,
    CompressedEntries,
    CrossAttention,
    IndexKeys,
    MLALatent,
    OpenBuffer,
    RecurrentState,
    Shared,
    SharedKV,
    SlidingWindow,
    StateArray,
    heads_per_rank,
)

formats = st.sampled_from(sorted(FORMATS)).map(get_format)
heads = st.sampled_from([1, 2, 3, 4, 8, 9, 64])
widths = st.sampled_from([1, 4, 64, 80, 96, 112, 128, 192, 576])
lengths = st.integers(1, 40)
ratios = st.sampled_from([2, 4, 128])
arrays = st.builds(
    StateArray, st.just("state"), st.tuples(st.tuples(heads, widths), st.tuples(heads, widths)), lengths, formats
)
kv = (heads, widths, widths, formats)
parts = st.one_of(
    st.builds(Attention, *kv),
    st.builds(SlidingWindow, *kv, window=lengths, sinks=st.integers(0, 4)),
    st.builds(ChunkedLocal, *kv, chunk=lengths),
    st.builds(CrossAttention, *kv, encoder_tokens=st.integers(0, 100)),
    st.builds(MLALatent, widths, widths, formats),
    st.builds(SharedKV, widths, lengths, formats),
    st.builds(CompressedEntries, ratios, widths, formats),
    st.builds(IndexKeys, widths, formats, st.sampled_from([1, 4])),
    st.builds(RecurrentState, st.just("mamba2"), st.tuples(arrays, arrays)),
    st.builds(OpenBuffer, st.tuples(arrays)),
    st.builds(Shared, st.integers(0, 80)),
)
fast = settings(max_examples=200, deadline=None, derandomize=True)


@fast
@given(parts, st.integers(0, 600))
def test_bytes_never_shrink_and_never_exceed_one_entry_per_token(part: CacheSpec, tokens: int) -> None:
    assert part.bytes_at(tokens) <= part.bytes_at(tokens + 1)
    assert part.retained(tokens) <= part.entries(tokens) <= tokens
    assert part.bytes_at(tokens) == part.entries(tokens) * part.entry_bytes + part.fixed_bytes


@fast
@given(parts, st.integers(0, 30))
def test_slope_is_the_difference_over_one_period_far_above_every_window(part: CacheSpec, n: int) -> None:
    period = 512  # a multiple of every ratio
    far = 1000 * period + n
    assert part.bytes_at(far + period) - part.bytes_at(far) == part.slope() * period


@fast
@given(parts)
def test_slope_below_every_window_is_what_the_first_tokens_add(part: CacheSpec) -> None:
    rule = part.retention
    period = rule.size if rule.rule == "stride" else 1
    assert part.bytes_at(period) - part.bytes_at(0) == part.slope(0) * period


@fast
@given(parts, st.sampled_from([1, 2, 3, 4, 8, 16]), st.integers(0, 300))
def test_ranks_together_hold_at_least_everything(part: CacheSpec, tp: int, tokens: int) -> None:
    try:
        rank = part.per_rank(tp)
    except ValueError:
        count = part.num_kv_heads  # type: ignore[attr-defined]
        assert count % tp and tp % count
        return
    assert tp * rank.bytes_at(tokens) >= part.bytes_at(tokens) >= rank.bytes_at(tokens)
    if isinstance(part, Attention) and part.num_kv_heads % tp == 0:
        assert tp * rank.bytes_at(tokens) == part.bytes_at(tokens)
    if isinstance(part, MLALatent | SharedKV | IndexKeys | CompressedEntries):
        assert rank == part  # nothing to split: every rank keeps all of it


@fast
@given(parts, st.integers(1, 70))
def test_page_layout(part: CacheSpec, block_size: int) -> None:
    layout = page_layout(part, block_size)
    end = 0
    for segment in layout.segments:
        assert segment.offset % 16 == 0 and segment.offset >= end  # aligned, no overlap
        assert segment.used_bytes <= segment.row_bytes
        assert segment.offset - end < 16  # nothing but alignment between segments
        end = segment.offset + segment.size_bytes
    assert layout.page_bytes % 16 == 0 and 0 <= layout.page_bytes - end < 16
    # cross attention's fixed bytes are its entries; a state's page is the whole state
    one_state = part.retention.rule == "state"
    assert layout.used_bytes == (part.fixed_bytes if one_state else block_size * part.entry_bytes)
    codes = [s for s in layout.segments if not s.name.endswith("_scale")] if not one_state else []
    assert all(s.row_bytes % 16 == 0 for s in codes)


@pytest.mark.parametrize(
    ("num_kv_heads", "tp", "local"), [(8, 1, 8), (8, 8, 1), (8, 16, 1), (2, 8, 1), (1, 8, 1), (9, 3, 3), (4, 2, 2)]
)
def test_heads_per_rank(num_kv_heads: int, tp: int, local: int) -> None:
    assert heads_per_rank(num_kv_heads, tp) == local


def test_heads_that_neither_split_nor_repeat_are_refused() -> None:
    with pytest.raises(ValueError, match="tp 2: must divide, or be a multiple of, the 9 KV heads"):
        heads_per_rank(9, 2)


def test_a_chunk_forgets_at_its_boundary_but_memory_is_there_for_all_of_it() -> None:
    part = ChunkedLocal(2, 8, 8, get_format("bf16"), chunk=4)
    assert [part.retained(n) for n in range(10)] == [0, 1, 2, 3, 4, 1, 2, 3, 4, 1]
    assert [part.entries(n) for n in range(10)] == [0, 1, 2, 3, 4, 4, 4, 4, 4, 4]


def test_groups_of_a_state_that_do_not_divide_are_replicated() -> None:
    # 8 heads of 64 and 1 group of 2 x 16 over 4 ranks: 2 heads each, the group on every rank
    conv = StateArray("conv", ((8, 64), (1, 32)), 3, get_format("bf16"))
    assert conv.array_bytes == (8 * 64 + 32) * 3 * 2
    assert conv.per_rank(4).array_bytes == (2 * 64 + 32) * 3 * 2
