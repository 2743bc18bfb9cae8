"""The paged policy against a sequence that is really walked, token by token and page by page."""

import pytest

from kvlab.plan.policies import (
    PolicySettings,
    default_block_size,
    ideal_bytes,
    paged_pool_bytes,
    sequence_bytes,
)
from kvlab.specs.formats import get_format
from kvlab.specs.layout import Group, group_parts
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import (
    Attention,
    ChunkedLocal,
    CompressedEntries,
    CrossAttention,
    MLALatent,
    OpenBuffer,
    RecurrentState,
    Retention,
    SlidingWindow,
    StateArray,
)
from kvlab.specs.pools import group_pages

BF16, INT8 = get_format("bf16"), get_format("int8")
FULL = Attention(2, 64, 64, BF16)


def model_of(*parts, query_heads=8):
    """A model with one layer per part."""
    layers = tuple(LayerSpec(i, (p,) if not isinstance(p, tuple) else p) for i, p in enumerate(parts))
    return ModelSpec("tiny", "tiny", layers, 256, query_heads, 1000)


def window(size, heads=2, dim=64, fmt=BF16):
    return SlidingWindow(heads, dim, dim, fmt, window=size)


def group_of(rule, block_size):
    return Group("g", rule, block_size, (), ())


def peak_by_walking(rule, block_size, tokens, in_flight):
    """The most pages held over every way to cut `tokens` into steps of at most `in_flight`: each state is tried."""
    peak = 0
    for computed in range(tokens):
        first = 0
        if rule.rule == "window":
            first = max(0, computed - rule.size + 1)
        elif rule.rule == "chunk":
            first = computed // rule.size * rule.size
        for new in range(1, min(in_flight, tokens - computed) + 1):
            held = {t // block_size for t in range(first, computed + new)}
            peak = max(peak, len(held))
    return peak


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("size", [1, 2, 5, 8, 17])
@pytest.mark.parametrize("in_flight", [1, 2, 7, 64])
def test_a_window_holds_exactly_the_pages_of_the_worst_walk(block_size, size, in_flight):
    rule = Retention("window", size)
    for tokens in range(1, 60):
        want = peak_by_walking(rule, block_size, tokens, in_flight)
        assert group_pages(group_of(rule, block_size), tokens, in_flight) == want, tokens


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("size", [1, 4, 6, 32])
@pytest.mark.parametrize("in_flight", [1, 5, 64])
def test_a_chunk_never_holds_more_than_predicted_and_at_most_one_page_less(block_size, size, in_flight):
    rule = Retention("chunk", size)
    for tokens in range(1, 60):
        walked = peak_by_walking(rule, block_size, tokens, in_flight)
        assert walked <= group_pages(group_of(rule, block_size), tokens, in_flight) <= walked + 1, tokens


def test_full_state_entries_and_encoder_pages():
    assert group_pages(group_of(Retention("all"), 16), 33, 2048) == 3
    assert group_pages(group_of(Retention("state"), 16), 33, 2048) == 1
    # 4 tokens an entry, 16 tokens a page: the fifth entry, complete at 20 tokens, needs a second page
    assert [group_pages(group_of(Retention("stride", 4), 16), n, 8) for n in (3, 4, 19, 20)] == [0, 1, 1, 2]
    image = CrossAttention(2, 64, 64, BF16, encoder_tokens=17)
    assert group_pages(Group("g", Retention("encoder"), 16, (), (), (image,)), 1, 1) == 2


def test_the_allocator_reaches_the_predicted_bytes_and_never_more():
    from kvlab.cache.manager import KVCacheManager

    model = model_of(FULL, window(8), window(8))
    settings = PolicySettings("paged", block_size=4, in_flight=6)
    groups = group_parts(model, 4)
    predicted = sequence_bytes(model, 61, settings)
    manager = KVCacheManager(groups, [40, 40], in_flight=6)
    peaks, computed = [0, 0], 0
    while computed < 61:
        new = min(6, 61 - computed)
        assert manager.allocate("a", computed + new)
        peaks = [max(peak, pool.num_held) for peak, pool in zip(peaks, manager.pools, strict=True)]
        computed += new
        manager.advance("a", computed)
    # 61 tokens end in 16 full pages; 8 - 1 old tokens and 6 new ones span 13 tokens, over at most 4 pages
    assert [g.pages for g in predicted.groups] == peaks == [16, 4]
    assert predicted.total == sum(p * g.block_bytes for p, g in zip(peaks, groups, strict=True))


def test_bytes_split_into_data_tail_padding_and_reserve():
    # 3 layers: full and window of 2 heads x 24 values in int8 (24 codes padded to 32, 4 bytes of scale)
    model = model_of(Attention(2, 24, 24, INT8), window(8, dim=24, fmt=INT8), window(8, dim=24, fmt=INT8))
    full, sliding = sequence_bytes(model, 21, PolicySettings("paged", block_size=4, in_flight=9)).groups
    row = 2 * 2 * (24 + 4)
    page = 4 * 2 * 2 * (32 + 4)
    assert (full.pages, full.block_bytes, full.total) == (6, page, 6 * page)
    assert (full.useful, full.page_tail, full.padding, full.reserve) == (21 * row, 3 * row, 6 * 4 * 2 * 2 * 8, 0)
    # alone the window spans 8 tokens over at most 3 pages; with 9 in flight 16 tokens over at most 5
    assert (sliding.pages, sliding.block_bytes) == (5, 2 * page)
    assert sliding.useful == 2 * 8 * row
    assert sliding.page_tail == 2 * (12 - 8) * row
    assert sliding.padding == 3 * 2 * 4 * 2 * 2 * 8
    assert sliding.reserve == 2 * 2 * page
    assert sliding.total == 5 * 2 * page


def test_a_tiny_window_with_many_tokens_in_flight_is_mostly_reserve():
    # vllm#54703: admission was dominated by pages for tokens in flight
    model = model_of(window(8))
    (group,) = sequence_bytes(model, 100_000, PolicySettings("paged", block_size=4, in_flight=8192)).groups
    assert group.reserve / group.total > 0.99
    assert group.useful == 8 * 2 * 2 * 64 * 2


@pytest.mark.parametrize("tokens", [1, 16, 100, 128])
def test_below_its_window_a_sliding_layer_costs_what_a_full_layer_costs(tokens):
    # hf-mem#60 and #70, tt-xla#5727: window 1,024, length at most 128
    for policy in ("ideal", "paged", "vllm"):
        settings = PolicySettings(policy, block_size=16, in_flight=64)
        sliding = sequence_bytes(model_of(window(1024)), tokens, settings).total
        full = sequence_bytes(model_of(FULL), tokens, settings).total
        # vLLM's formula for windows always adds a block
        extra = sequence_bytes(model_of(FULL), 16, settings).total if policy == "vllm" else 0
        assert sliding == full + extra


def test_pool_bytes_count_the_null_pages_that_are_asked_for():
    groups = group_parts(model_of(FULL, window(8), window(8)), 16)
    page = 16 * 2 * 2 * 64 * 2
    assert [g.block_bytes for g in groups] == [page, 2 * page]
    assert paged_pool_bytes(groups, [10, 3]) == 16 * page
    assert paged_pool_bytes(groups, {"full": 10, "sliding8": 3}) == 16 * page
    with pytest.raises(ValueError, match="one number for each of 2 groups"):
        paged_pool_bytes(groups, [10])
    with pytest.raises(ValueError, match="must name each of the groups once"):
        paged_pool_bytes(groups, {"full": 10})


def test_open_buffers_are_in_the_paged_policy_only():
    buffer = OpenBuffer((StateArray("kv", ((1, 512),), 3, BF16),))
    model = model_of((FULL, buffer))
    assert ideal_bytes(model, 16) == 16 * 512
    paged = sequence_bytes(model, 16, PolicySettings("paged"))
    assert paged.total == 16 * 512 + 3 * 512 * 2
    assert paged.pool_overhead == paged.total  # one page of each group: here as much as the sequence


def test_states_latents_and_encoders_have_pages_of_their_own():
    state = RecurrentState("mamba2", (StateArray("conv", ((10, 1),), 3, BF16), StateArray("ssm", ((4, 8),), 8, BF16)))
    model = model_of(MLALatent(512, 64, BF16), state, CrossAttention(2, 64, 64, BF16, encoder_tokens=17))
    sequence = sequence_bytes(model, 20, PolicySettings("paged"))
    by_name = {g.name: g for g in sequence.groups}
    assert by_name["full"].total == 32 * 1152
    assert (by_name["state"].useful, by_name["state"].total) == (60 + 512, 64 + 512)
    assert by_name["encoder"].total == 32 * 512
    assert sequence.useful == ideal_bytes(model, 20)


def test_block_size_grows_to_hold_whole_entries_of_each_ratio():
    model = model_of(CompressedEntries(4, 64, BF16), CompressedEntries(24, 64, BF16))
    assert default_block_size(model) == 48
    assert default_block_size(model_of(FULL)) == 16
    with pytest.raises(ValueError, match="block_size 16: must be a multiple of 24"):
        sequence_bytes(model, 100, PolicySettings("paged", block_size=16))


@pytest.mark.parametrize("wrong", [{"policy": "magic"}, {"block_size": 0}, {"in_flight": 0}, {"cp": 0}])
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PolicySettings(**wrong)


def test_chunked_layers_count_the_fullest_chunk():
    part = ChunkedLocal(2, 64, 64, BF16, chunk=8)
    assert ideal_bytes(model_of(part), 9) == 8 * 512
