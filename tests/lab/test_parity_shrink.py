"""Shrinking keeps the layer pattern, the ratios and every length that must bind."""

import math

import pytest

from kvlab.lab.parity.shrink import HEAD_DIM, TESTED_TOKENS, WINDOW, keep_layers, shrink
from kvlab.models.facts import ModelConfig

FULL = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
}


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [
        ("f", [0]),
        ("ff", [0, 1]),
        ("f" * 32, [0, 1]),
        ("sf" * 13, [0, 1]),
        ("ssf" * 4, [0, 1, 2]),
        ("sssssf" * 4 + "ss", [0, 1, 2, 3, 4, 5, 24, 25]),
        ("f" + "ss" * 6 + "f", [0, 1, 13]),
        ("f" * 8 + "s" * 8, [0, 1, 8, 9]),
        ("fs", [0, 1]),
        ("ffs", [0, 2]),
    ],
)
def test_layers_kept(kinds, kept):
    assert list(keep_layers(kinds)) == kept


def test_a_plain_llama():
    small = shrink({"model_type": "llama"} | FULL)
    facts = ModelConfig.from_hf(small.config)
    assert small.kept_layers == (0, 1)
    attention = facts.layers[0].branches[0].module
    assert (attention.num_query_heads, attention.num_kv_heads, attention.key_dim) == (8, 2, HEAD_DIM)
    assert facts.hidden_size == 128
    assert ("num_hidden_layers", 32, 2) in small.changes and ("hidden_size", 4096, 128) in small.changes
    assert "sliding_window" not in small.config


def test_all_layers():
    assert shrink({"model_type": "llama"} | FULL, all_layers=True).config["num_hidden_layers"] == 32


def test_an_explicit_head_dim_stays_unequal_to_hidden_over_heads():
    facts = ModelConfig.from_hf(shrink({"model_type": "qwen3", "head_dim": 192} | FULL).config)
    attention = facts.layers[0].branches[0].module
    assert attention.key_dim * attention.num_query_heads != facts.hidden_size


def test_multi_query_and_multi_head_stay_what_they_are():
    for kv_heads, expected in ((1, (32, 1)), (32, (4, 4)), (16, (4, 2))):
        facts = ModelConfig.from_hf(shrink({"model_type": "llama"} | FULL | {"num_key_value_heads": kv_heads}).config)
        attention = facts.layers[0].branches[0].module
        assert (attention.num_query_heads, attention.num_kv_heads) == expected


def windows(config) -> list[int]:
    return [layer.branches[0].module.window for layer in ModelConfig.from_hf(config).layers]


def windows_after(window: int | None) -> set[int]:
    return set(windows(shrink({"model_type": "mistral", "sliding_window": window} | FULL).config))


def test_a_window_binds_within_the_tested_tokens():
    assert windows_after(4096) == {WINDOW} and 2 * WINDOW < TESTED_TOKENS
    # null stays null, it does not become a window
    assert windows_after(None) == {0}


def test_late_windows_keep_both_kinds():
    late = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}
    small = shrink(late | FULL)
    assert small.kept_layers == (0, 1, 28, 29)
    assert windows(small.config) == [0, 0, WINDOW, WINDOW]


def test_llama3_scaling_has_a_frequency_in_each_band():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {"model_type": "llama", "rope_theta": 500_000.0, "rope_scaling": scaling} | FULL
    rope = ModelConfig.from_hf(shrink(config).config).layers[0].branches[0].module.rope
    wavelengths = [2 * math.pi * rope.theta ** (2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)]
    kept = [w for w in wavelengths if w < rope.original_max_position / 4]
    stretched = [w for w in wavelengths if w > rope.original_max_position]
    assert kept and stretched and len(kept) + len(stretched) < len(wavelengths)
    assert (rope.factor, rope.low_freq_factor, rope.high_freq_factor) == (8.0, 1.0, 4.0)


def test_the_models_own_config_is_left_alone():
    config = {"model_type": "llama"} | FULL
    shrink(config)
    assert config == {"model_type": "llama"} | FULL
