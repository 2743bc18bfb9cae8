"""Three ways to share memory, by hand: page sizes, tokens per page, and where each layer's pages lie."""

import pytest

from kvlab.specs import catalogue
from kvlab.specs.families import from_config
from kvlab.specs.formats import get_format
from kvlab.specs.layout import group_parts
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import Attention, CompressedEntries, RecurrentState, SlidingWindow, StateArray
from kvlab.specs.pools import POOLS, pool_layout, sectors_as_they_are

BF16, FP32 = get_format("bf16"), get_format("fp32")
FULL = Attention(2, 16, 16, BF16)  # 128 bytes a token
WINDOW = SlidingWindow(2, 16, 16, BF16, window=8)


def model_of(*layers):
    parts = (layer if isinstance(layer, tuple) else (layer,) for layer in layers)
    return ModelSpec("m", "m", tuple(LayerSpec(i, p) for i, p in enumerate(parts)), 64, 4, 100)


def state(values):
    return RecurrentState("gated_delta", (StateArray("state", ((values, 1),), 1, FP32),))


def test_a_pool_per_kind_has_a_buffer_per_layer():
    layout = pool_layout(model_of(FULL, WINDOW, WINDOW), 4)
    assert layout.buffers == ((512,), (512, 512))
    assert layout.unit_bytes == (512, 1024)
    assert layout.pool_bytes([10, 3]) == 10 * 512 + 3 * 1024
    assert [layout.page_bytes(g) for g in range(2)] == [512, 1024]
    with pytest.raises(ValueError, match=r"num_blocks \(10,\): must be one number for each of 2 pools"):
        layout.pool_bytes([10])


def test_unified_pages_take_tokens_until_a_state_fits():
    # a state of 1,500 bytes, padded to 1,504; pages of 4 tokens are 512 bytes: three of them hold it
    layout = pool_layout(model_of(state(375), FULL, state(375)), 4, "unified")
    assert [(g.name, g.block_size, g.members) for g in layout.groups] == [
        ("full", 12, ((1, 0),)), ("state", 4, ((0, 0),)), ("state#2", 4, ((2, 0),)),
    ]  # fmt: skip
    assert layout.buffers == ((1536,),)
    assert [layout.page_bytes(g) for g in range(3)] == [1536] * 3


def test_unified_groups_have_equally_many_layers_and_the_last_is_padded():
    layout = pool_layout(model_of(FULL, *[WINDOW] * 5, FULL), 4, "unified")
    assert [(g.name, len(g.members)) for g in layout.groups] == [
        ("full", 2), ("sliding8", 2), ("sliding8#2", 2), ("sliding8#3", 1),
    ]  # fmt: skip
    # the i-th layer of each group lies in the i-th buffer
    assert [[place.buffer for place in places] for places in layout.places] == [[0, 1], [0, 1], [0, 1], [0]]
    assert layout.buffers == ((512, 512),)
    # 4 to 3 is less than one and a half: groups of four, and one empty place
    assert [len(g.members) for g in pool_layout(model_of(*[FULL] * 3, *[WINDOW] * 4), 4, "unified").groups] == [3, 4]


def test_unified_narrow_layers_take_more_tokens_into_a_page():
    narrow = SlidingWindow(1, 16, 16, BF16, window=8)
    layout = pool_layout(model_of(FULL, narrow, CompressedEntries(4, 32, BF16)), 4, "unified")
    # 512 bytes: 4 tokens of 128, 8 of 64, or 8 entries of 64, one per 4 tokens
    assert [(g.name, g.block_size) for g in layout.groups] == [("full", 4), ("sliding8", 8), ("compressed4", 32)]
    assert layout.groups[2].layouts[0].block_size == 8


def test_sectors_are_the_common_multiple_of_the_pages():
    layout = pool_layout(model_of(FULL, FULL, WINDOW, WINDOW, WINDOW), 4, "sectors")
    # pages of 2 and 3 layers: 1,024 and 1,536 bytes
    assert (layout.unit_bytes, layout.pages_per_unit) == ((3072,), (3, 2))
    assert [layout.page_bytes(g) for g in range(2)] == [1024, 1536]
    # a page holds its layers one after the other
    assert [p.layout["k"].offset for p in layout.places[1]] == [0, 512, 1024]
    assert [p.layout["v"].offset for p in layout.places[1]] == [256, 768, 1280]
    assert {p.layout.page_bytes for p in layout.places[1]} == {1536}


def test_sectors_without_a_small_common_multiple_are_the_largest_page_halved():
    # 16,400 bytes of state and pages of 512: the common multiple is 32 states
    layout = pool_layout(model_of(FULL, state(4100)), 4, "sectors")
    # pages of 512: 32 of them leave 16 of 16,400 bytes; 16 needs 512 more to divide by 32 and 16
    assert layout.pages_per_unit == (32, 1)
    assert layout.unit_bytes == (16896,)
    # where few pages fit, they take as many tokens as a half, a quarter, ... holds with at most an eighth left over
    layout = pool_layout(model_of(FULL, state(404)), 4, "sectors")
    assert [(g.block_size, n) for g, n in zip(layout.groups, layout.pages_per_unit, strict=True)] == [(12, 1), (4, 1)]


def test_sectors_for_pages_as_they_are_keep_every_block():
    # a common multiple that is small; all but the state's, 432 of 18,432 bytes unused by it; halves of a state
    for layers, counts, sector in (
        ((FULL, FULL, WINDOW, WINDOW, WINDOW), (3, 2), 3072),
        ((FULL, FULL, WINDOW, WINDOW, WINDOW, state(4500)), (18, 12, 1), 18432),
        ((FULL, WINDOW, WINDOW, CompressedEntries(4, 180, BF16), state(404)), (2, 1, 4, 1), 1664),
    ):
        groups = group_parts(model_of(*layers), 4)
        layout = sectors_as_they_are(groups)
        assert layout.groups == groups
        assert (layout.pages_per_unit, layout.unit_bytes) == (counts, (sector,))
    # a state that is a thousand pages long: no more than an eighth of the memory is lost, whatever it is long
    for values in range(100_000, 100_400, 13):
        layout = sectors_as_they_are(group_parts(model_of(FULL, WINDOW, WINDOW, state(values)), 4))
        for g, group in enumerate(layout.groups):
            assert 8 * layout.unit_bytes[0] <= 9 * layout.pages_per_unit[g] * group.block_bytes


@pytest.mark.parametrize("pools", [*POOLS, "as they are"])
def test_pages_of_a_unit_never_overlap_and_fit(pools):
    """Byte by byte, for a model of every retention the engine has."""
    model = model_of(FULL, (WINDOW, state(77)), (state(9), CompressedEntries(2, 40, BF16)), WINDOW, FULL, WINDOW)
    layout = sectors_as_they_are(group_parts(model, 4)) if pools == "as they are" else pool_layout(model, 4, pools)
    assert sorted(m for g in layout.groups for m in g.members) == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
                                                                   (4, 0), (5, 0)]  # fmt: skip
    for g, group in enumerate(layout.groups):
        widths = layout.buffers[layout.pool_of(g)]
        taken = set()
        for place, own in zip(layout.places[g], group.layouts, strict=True):
            row = widths[place.buffer] // layout.pages_per_unit[g]
            assert place.layout.page_bytes == row
            assert widths[place.buffer] % layout.pages_per_unit[g] == row % 16 == 0
            for segment, plain in zip(place.layout.segments, own.segments, strict=True):
                assert segment.offset % 16 == 0 and segment.size_bytes == plain.size_bytes
                cells = {(place.buffer, b) for b in range(segment.offset, segment.offset + segment.size_bytes)}
                assert not cells & taken
                assert max(b for _, b in cells) < row
                taken |= cells
        # what the layers need fits what a page id costs
        assert group.block_bytes <= layout.page_bytes(g)


@pytest.mark.parametrize("name", ["gemma-3-270m", "gemma-4-e2b", "falcon-h1-7b", "gpt-oss-20b", "llama-3-8b"])
def test_every_policy_serves_the_catalogue(name):
    model = from_config(catalogue.get(name))
    plain = {m for g in group_parts(model, 16) for m in g.members}
    for pools in POOLS:
        layout = pool_layout(model, 16, pools)
        assert {m for g in layout.groups for m in g.members} == plain
        assert len({g.name for g in layout.groups}) == len(layout.groups)


def test_unknown_policies_are_refused():
    with pytest.raises(ValueError, match="pools 'one': must be one of per_kind, unified, sectors"):
        pool_layout(model_of(FULL), 4, "one")


def test_windows_that_differ_in_sinks_have_names_of_their_own():
    sinks = SlidingWindow(2, 16, 16, BF16, window=8, sinks=2)
    assert [g.name for g in group_parts(model_of(sinks, WINDOW), 4)] == ["sliding8", "sliding8+2sinks"]
