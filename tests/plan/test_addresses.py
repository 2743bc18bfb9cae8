"""From which page on 32-bit offsets read another page: counted, and tried with numbers that wrap."""

from __future__ import annotations

import ctypes

import pytest

from kvlab.plan import make_plan
from kvlab.plan.addresses import INT32_OFFSETS, page_elements, reach
from kvlab.specs.catalogue import get
from kvlab.specs.families import from_config
from kvlab.specs.formats import FORMATS
from kvlab.specs.kv_dtypes import with_formats
from kvlab.specs.layout import group_parts


@pytest.mark.parametrize(("block_size", "heads", "dim"), [(16, 8, 128), (1, 1, 64), (32, 5, 80)])
def test_plain_keys_and_values_have_the_published_limit(block_size: int, heads: int, dim: int) -> None:
    """Pitfall: vllm#50427, interleaved keys and values: 2**31 / (block size x 2 x KV heads x values of a head) blocks."""
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": heads * dim, "num_attention_heads": heads,
              "head_dim": dim, "num_key_value_heads": heads, "vocab_size": 9, "intermediate_size": 9}  # fmt: skip
    (group,) = group_parts(from_config(config), block_size)
    assert reach(group, 0).int32_pages == 2**31 // (block_size * 2 * heads * dim)


def wrapped(page: int, elements: int, rest: int) -> int:
    """The offset of an element as a signed 32-bit product and sum give it."""
    return ctypes.c_int32(ctypes.c_int32(page * elements).value + rest).value


@pytest.mark.parametrize("kv_dtype", [name for name in FORMATS if name != "fp64"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3", "gemma-3-27b", "qwen3-next-80b-a3b"])
def test_the_last_page_before_the_limit_is_reached_and_the_next_one_is_not(model: str, kv_dtype: str) -> None:
    """Elements as bytes over the size of the narrowest code, of the layer that has the most."""
    spec = from_config(get(model))
    if model == "deepseek-v3" and FORMATS[kv_dtype].group_tokens:
        with pytest.raises(ValueError):  # groups of tokens are for keys and values that stay
            group_parts(with_formats(spec, kv_dtype), 32)
        return
    for group in group_parts(with_formats(spec, kv_dtype), 32):
        found = reach(group, 10**12)
        most, last = found.page_elements, found.int32_pages - 1
        assert (
            most == max(page_elements(layout) for layout in group.layouts) <= max(x.page_bytes for x in group.layouts)
        )
        assert wrapped(last, most, most - 1) == last * most + most - 1 < INT32_OFFSETS
        assert wrapped(last + 1, most, most - 1) < 0
        assert found.pool_pages == 10**12 // sum(layout.page_bytes for layout in group.layouts)


def test_a_plan_says_where_int32_is_not_enough() -> None:
    """int8 halves a page's bytes and not its elements: the same memory holds twice as many."""
    wide = make_plan("llama-3.1-8b", gpu="h200").to_json()
    narrow = make_plan("llama-3.1-8b", gpu="h200", kv_dtype="int8")
    assert [(x["group"], x["int32_pages"], x["needs_int64"]) for x in wide["addresses"]] == [("full", 65_536, False)]
    (found,) = narrow.to_json()["addresses"]
    page = 16 * 2 * 8 * (128 + 4)
    assert found == {"group": "full", "page_elements": page, "int32_pages": 2**31 // page,
                     "pool_pages": narrow.memory.free_bytes // (32 * page), "needs_int64": True}  # fmt: skip
    said = f"group full: 32-bit offsets reach {2**31 // page:,} pages of a layer"
    assert any(row.startswith(said) for row in narrow.to_json()["assumptions"]) and said in narrow.explain().replace(
        "\n    ", " "
    )
    assert not any("32-bit" in row for row in wide["assumptions"])


def test_stages_with_other_layers_are_looked_at_each_on_its_own() -> None:
    """One GPU of eight holds one KV head of eight: its pages are an eighth as wide, and more fit."""
    plan = make_plan("llama-3.1-70b", gpu="h200", tp=8, pp=2, kv_dtype="fp8")
    (found,) = plan.to_json()["addresses"]
    assert found["page_elements"] == 16 * 2 * 128 and found["int32_pages"] == 2**31 // (16 * 2 * 128)
    assert (
        found["pool_pages"] == plan.memory.free_bytes // (40 * 16 * 2 * 128) > found["int32_pages"]
        and found["needs_int64"]
    )
