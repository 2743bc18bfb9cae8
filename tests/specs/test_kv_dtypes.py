"""Rules of formats: which part of which layer gets which, and what is refused."""

from __future__ import annotations

import pytest

from kvlab.specs.families import from_config
from kvlab.specs.kv_dtypes import canonical, with_formats
from kvlab.specs.layout import group_parts

BASE = {"num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 99, "intermediate_size": 64, "max_position_embeddings": 512}  # fmt: skip
HYBRID = BASE | {
    "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}  # fmt: skip
DENSE = BASE | {"model_type": "llama"}


def formats(config: dict, rule: str) -> list[str]:
    return [part.format.name for _, part in with_formats(from_config(config), rule).parts()]


def test_later_terms_win() -> None:
    assert formats(DENSE, "int4,first=2:bf16,last=1:int8") == ["bf16", "bf16", "int4", "int4", "int4", "int8"]
    assert formats(DENSE, "int4,layers=1+4:native") == ["int4", "bf16", "int4", "int4", "bf16", "int4"]
    assert formats(HYBRID, "fp8,sliding=bf16") == ["bf16", "fp8_e4m3"] * 3


def test_a_format_of_groups_takes_full_layers_and_leaves_windows() -> None:
    spec = with_formats(from_config(HYBRID), "kivi2")
    kinds = [tuple(part.kind for part in layer.parts) for layer in spec.layers]
    assert kinds == [("sliding",), ("closed", "recent")] * 3
    assert [g.name for g in group_parts(spec, 32)] == ["sliding32", "sliding160", "compressed32"]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("fp7", "kv_dtype 'fp7': must be one of fp64"),
        ("int4,fp7", "'fp7' must be KIND=FORMAT"),
        ("int4,windows=bf16", "'windows' must be one of full, sliding"),
        ("int4,first=0:bf16", "must be first=N:FORMAT"),
        ("int4,first=bf16", "must be first=N:FORMAT"),
        ("int4,layers=9:bf16", "layer 9: the model has layers 0 to 5"),
        ("int4,sliding=fp7", "dtype 'fp7'"),
    ],
)
def test_what_a_rule_must_be(rule: str, said: str) -> None:
    with pytest.raises(ValueError, match="kv_dtype") as raised:
        with_formats(from_config(DENSE), rule)
    assert said in str(raised.value)


def test_groups_need_keys_and_values_of_all_tokens() -> None:
    latent = DENSE | {"model_type": "deepseek_v2", "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                      "v_head_dim": 8, "q_lora_rank": None, "first_k_dense_replace": 6}  # fmt: skip
    with pytest.raises(ValueError, match="layer 0 keeps mla entries, kivi2 is for keys and values"):
        with_formats(from_config(latent), "kivi2")
    with pytest.raises(ValueError, match="no layer keeps the keys and values of all tokens"):
        with_formats(from_config(DENSE | {"model_type": "mistral", "sliding_window": 32}), "kivi2")
    with pytest.raises(ValueError, match="block_size 16: must be a multiple of 32"):
        group_parts(with_formats(from_config(DENSE), "kivi2"), 16)


def test_names_become_the_formats_own() -> None:
    assert canonical("FP8,sliding=bfloat16,first=1:half") == "fp8_e4m3,sliding=bf16,first=1:fp16"
