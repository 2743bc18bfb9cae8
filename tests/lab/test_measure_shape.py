"""Cutting a shape: the vocabulary, then layers, then width, until it fits; every factor stated."""

from __future__ import annotations

import pytest

from kvlab.lab.measure_shape import Workload, cut_shape, layer_period, page_tokens, widths
from kvlab.plan.explore import own_config
from kvlab.specs import catalogue

MIB = 2**20
WORK = Workload(context=1024, batch=4, kv_dtype="bf16", weight_dtype="fp32")


def shape(**controls: object) -> dict:
    base = {"model": "own", "attention": "gqa", "layers": 12, "query_heads": 8, "kv_heads": 4, "head_dim": 64}
    return own_config({**base, **controls})


def test_what_fits_is_not_cut_but_for_the_vocabulary() -> None:
    cut = cut_shape(shape(), WORK, 2**40, 1e18)
    assert (cut.layers, cut.width, cut.vocabulary) == (12, 1, 4096)
    # 12 layers x (k and v of 4 heads x 64 values x 2 bytes) x 1,024 tokens x 4 sequences, and a null page of 16 tokens
    assert cut.kv_bytes == 12 * (2 * 4 * 64 * 2) * (1024 * 4 + 16)
    # hidden 512, feed-forward 1,792: q, o 512x512; k, v 512x256; three matrices of 512x1792; two norms
    layer = 2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 1792 + 2 * 512
    assert cut.weights_bytes == 4 * (12 * layer + 2 * 4096 * 512 + 512)
    assert cut.describe() == "all 12 layers at full width, 4,096 of 128,256 embedding rows"


def test_layers_go_before_width() -> None:
    whole = cut_shape(shape(), WORK, 2**40, 1e18)
    half = cut_shape(shape(), WORK, (whole.weights_bytes + whole.kv_bytes) // 2, 1e18)
    assert half.width == 1 and 1 < half.layers < 12
    assert half.weights_bytes + half.kv_bytes <= (whole.weights_bytes + whole.kv_bytes) // 2
    one_more = cut_shape(shape(layers=half.layers + 1), WORK, 2**40, 1e18)
    assert one_more.weights_bytes + one_more.kv_bytes > (whole.weights_bytes + whole.kv_bytes) // 2


def test_when_one_layer_is_too_much_the_width_is_halved() -> None:
    cut = cut_shape(shape(layers=2, query_heads=32, kv_heads=8), WORK, 24 * MIB, 1e18)
    assert cut.width == 8
    heads = [cut.config[k] for k in ("num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size")]
    assert heads == [4, 1, 256, 896] and cut.config["head_dim"] == 64
    assert "1/8 of the width" in cut.describe()


def test_a_step_that_would_take_too_long_is_cut_too() -> None:
    free = cut_shape(shape(), WORK, 2**40, 1e18)
    cut = cut_shape(shape(), WORK, 2**40, free.operations / 3)
    assert cut.layers < 12 and cut.operations <= free.operations / 3


def test_a_hybrid_keeps_whole_periods_of_its_layers() -> None:
    config = shape(attention="hybrid", window=128, full_every=4)
    assert layer_period(config) == 4
    cut = cut_shape(config, WORK, 60 * MIB, 1e18)
    assert cut.layers % 4 == 0 and cut.config["layer_types"] == config["layer_types"][: cut.layers]


def test_an_impossible_workload_says_what_to_lower() -> None:
    with pytest.raises(ValueError, match=r"context 1,048,576 x batch 1,024: even 1 of 12 layers .* lower one of them"):
        cut_shape(shape(), Workload(2**20, 1024, "bf16", "fp32"), 600 * MIB, 1e18)


@pytest.mark.parametrize(("heads", "kv_heads", "expected"), [(8, 4, [1, 2, 4, 8]), (9, 3, [1]), (12, 1, [1, 2, 4])])
def test_heads_are_divided_only_while_groups_stay_whole(heads: int, kv_heads: int, expected: list[int]) -> None:
    assert widths({"num_attention_heads": heads, "num_key_value_heads": kv_heads}) == expected


@pytest.mark.parametrize(("controls", "tokens"), [({}, 16), ({"attention": "compressed", "ratio": 4}, 16),
                                                  ({"attention": "compressed", "ratio": 128}, 128)])  # fmt: skip
def test_a_page_holds_whole_compressed_entries(controls: dict, tokens: int) -> None:
    assert page_tokens(shape(**controls)) == tokens


@pytest.mark.parametrize("attention", ["mla", "recurrent", "compressed"])
def test_every_kind_of_layer_can_be_cut(attention: str) -> None:
    config = shape(attention=attention, layers=12, full_every=3)
    work = Workload(1024, 4, "bf16", "fp32", block_size=page_tokens(config))
    whole = cut_shape(config, work, 2**40, 1e18)
    cut = cut_shape(config, work, (whole.weights_bytes + whole.kv_bytes) // 3, 1e18)
    assert cut.layers < 12 and cut.layers % layer_period(config) == 0
    assert layer_period(config) == {"recurrent": 3}.get(attention, 1)
    tiny = cut_shape(config, work, (whole.weights_bytes + whole.kv_bytes) // 40, 1e18)
    assert tiny.width > 1


def test_every_named_model_is_cut_or_says_why_it_is_not() -> None:
    """A preset of the explorer must not end in a KeyError: wrappers hold their text part, some families name fields apart."""
    cut, refused = [], {}
    for name in catalogue.names():
        config = catalogue.get(name)
        work = Workload(4096, 1, "bf16", "fp32", block_size=page_tokens(config))
        try:
            cut.append((name, cut_shape(config, work, 640 * MIB, 2e10)))
        except ValueError as error:
            refused[name] = str(error)
    shapes = dict(cut)
    assert shapes["gemma-3-27b"].of_layers == 62 and shapes["gemma-3-27b"].layers % 6 == 0
    assert refused["gpt2"] == "gpt2 config: has no num_hidden_layers, by which its shape would be cut; its plan stands"
    assert len(cut) >= 120 and len(cut) + len(refused) == len(catalogue.names())
