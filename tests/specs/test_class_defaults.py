"""The defaults that rows of the family table take over are those of transformers' config classes."""

from __future__ import annotations

from typing import Any

import pytest

from kvlab.specs.families.table import FAMILIES

transformers = pytest.importorskip("transformers", reason="compares with transformers' config classes")

# what a class computes in its __init__ rather than in a field
COMPUTED = {
    ("gemma4_text", "global_head_dim"): 512,
    ("mpt", "attn_type"): "multihead_attention",
}


def _class(model_type: str) -> Any:
    # some text parts are registered only under their own names
    try:
        return transformers.CONFIG_MAPPING[model_type]
    except KeyError:
        return None


CASES = [
    (model_type, name)
    for model_type, family in FAMILIES.items()
    for name in family.defaults
    if _class(model_type) is not None
]


@pytest.mark.parametrize(("model_type", "name"), CASES)
def test_default(model_type: str, name: str) -> None:
    family, cls = FAMILIES[model_type], _class(model_type)
    ours = family.defaults[name]
    if (model_type, name) in COMPUTED:
        assert ours == COMPUTED[model_type, name]
        return
    spellings = family.names.get(name, ())
    spellings = (*((spellings,) if isinstance(spellings, str) else spellings), name)
    attributes = [getattr(cls, "attribute_map", {}).get(key, key) for key in spellings]
    found = [getattr(cls, key) for key in attributes if hasattr(cls, key)]
    assert found, f"transformers' {model_type} class has none of {attributes}"
    theirs = list(found[0]) if isinstance(found[0], tuple) else found[0]
    assert ours == theirs


def test_most_families_are_compared() -> None:
    assert len({model_type for model_type, _ in CASES}) >= 30


@pytest.mark.parametrize("model_type", [t for t, f in FAMILIES.items() if "num_key_value_heads" in f.defaults])
def test_absent_kv_heads_mean_multi_head_only_where_the_class_says_so(model_type: str) -> None:
    cls = _class(model_type)
    if cls is None:
        pytest.skip(f"transformers has no {model_type} class with this field")
    assert getattr(cls, "num_key_value_heads", "absent") == FAMILIES[model_type].defaults["num_key_value_heads"]
