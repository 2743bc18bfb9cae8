"""How each way of writing a config is read, and what is refused."""

from __future__ import annotations

import pytest

from kvlab.specs import catalogue
from kvlab.specs.families import WRAPPERS, from_config
from kvlab.specs.families.table import FAMILIES

TINY = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 100}


def kinds(config: dict, **options: object) -> list[str]:
    return [layer.kind for layer in from_config(config, **options).layers]


# what cannot be sized says what is missing


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "missing model_type"),
        ({"model_type": "lama"}, "'lama': not a known architecture"),
        ({"model_type": "lama"}, "close: llama"),
        ({"model_type": "t5"}, "which layers keep windows or states"),
        ({"model_type": "opt", "hidden_size": 64, "num_attention_heads": 8}, "opt config: missing num_hidden_layers"),
        ({"model_type": "qwen3", **TINY}, "missing num_key_value_heads"),
        ({"model_type": "qwen2", **TINY, "use_sliding_window": True, "max_window_layers": None}, "missing layer_types"),
        ({"model_type": "llama", **TINY, "num_hidden_layers": "4"}, "is '4', must be a positive integer"),
        ({"model_type": "llama", **TINY, "num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"model_type": "llama", **TINY, "num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"model_type": "llama", **TINY, "num_attention_heads": 7}, "missing head_dim, and hidden_size 64"),
        ({"model_type": "deepseek_v3", **TINY}, "missing kv_lora_rank"),
        ({"model_type": "jamba", **TINY}, "missing attn_layer_period"),
        ({"model_type": "granitemoehybrid", **TINY}, "missing layer_types"),
        ({"model_type": "nemotron_h", **TINY}, "missing layers_block_type or hybrid_override_pattern"),
        ({"model_type": "nemotron_h", **TINY, "hybrid_override_pattern": "MX"}, "hybrid_override_pattern of M"),
        ({"model_type": "deepseek_v4", **TINY}, "compress_ratios must be a list of at least 4 ratios"),
        ({"model_type": "mllama"}, "missing text_config or llm_config or language_config"),
        ({"model_type": "gemma3_text", **TINY, "layer_types": ["full_attention"]}, "1 layer types for 4 layers"),
        ({"model_type": "gemma3_text", **TINY, "layer_types": ["ring"] * 4}, "layer type 'ring' is not one of"),
        ({"model_type": "gemma3_text", **TINY, "layer_types": "full"}, "layer_types is 'full', must be a list"),
        ({"model_type": "mpt", **TINY, "attn_config": {"attn_type": "local"}}, "attn_type 'local' is not known"),
    ],
)  # fmt: skip
def test_refused(config: dict, words: str) -> None:
    with pytest.raises(ValueError) as error:
        from_config(config)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_format_and_negative_image_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype 'fp3'"):
        from_config({"model_type": "opt", **TINY}, kv_format="fp3")
    with pytest.raises(ValueError, match="dtype 'int8': states are kept in a plain type"):
        from_config({"model_type": "opt", **TINY}, state_format="int8")
    with pytest.raises(ValueError, match="image_tokens -1"):
        from_config({"model_type": "opt", **TINY}, image_tokens=-1)


DAMAGE = [None, "x", -1, 0, 1.5, True, 10**30, float("inf"), [], [None], ["x"], {}, {"a": 1}]
DAMAGED = [
    "falcon-7b", "deepseek-v4-pro", "gemma-3n-e2b", "kimi-linear-48b-a3b", "llama-4-scout", "llama-3.2-90b-vision",
    "mpt-7b", "nemotron-h-8b", "qwen3-next-80b-a3b", "zamba2-7b",
]  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_field_is_read_or_refused_in_one_line(name: str) -> None:
    config = catalogue.get(name)
    where = config.get("text_config", config)
    for field in [*where, "rope_scaling", "layer_types", "sliding_window"]:
        kept = where.get(field)
        for value in DAMAGE:
            where[field] = value
            try:
                from_config(config).bytes_at(100)
            except ValueError as error:
                assert "\n" not in str(error)
        where[field] = kept


# heads


def test_explicit_head_dim_wins_over_the_division() -> None:
    model = from_config({"model_type": "llama", **TINY, "num_key_value_heads": 2, "head_dim": 32})
    assert model.bytes_per_token == 4 * 2 * 2 * 32 * 2


def test_null_kv_heads_mean_one_per_query_head_and_absence_is_noted() -> None:
    stated = from_config({"model_type": "llama", **TINY, "num_key_value_heads": None})
    absent = from_config({"model_type": "llama", **TINY})
    assert stated.bytes_per_token == absent.bytes_per_token == 4 * 2 * 8 * 8 * 2
    assert stated.notes == ()
    assert absent.notes == ("num_key_value_heads is not in the config: one KV head per query head",)


@pytest.mark.parametrize(
    ("flags", "heads"),
    [
        ({"multi_query": True}, 1),
        ({}, 1),  # the class's default is multi_query
        ({"multi_query": False}, 8),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({"multi_query": True, "num_kv_heads": 8}, 1),  # falcon-7b states num_kv_heads = 71 and keeps 1
    ],
)
def test_falcon(flags: dict, heads: int) -> None:
    assert from_config({"model_type": "falcon", **TINY, **flags}).bytes_per_token == 4 * 2 * heads * 8 * 2


# windows, chunks, shared tails


def test_mistral_null_window_is_full_and_absence_takes_the_class_default() -> None:
    base = {"model_type": "mistral", **TINY, "num_key_value_heads": 2}
    assert kinds({**base, "sliding_window": None}) == ["full"] * 4
    model = from_config(base)
    assert [part.retention.size for _, part in model.parts()] == [4096] * 4
    assert "sliding_window is not in the config: 4096, the default of transformers' mistral class" in model.notes


def test_qwen_window_binds_only_when_switched_on_and_from_max_window_layers_on() -> None:
    base = {"model_type": "qwen2", **TINY, "num_key_value_heads": 2, "sliding_window": 32, "max_window_layers": 3}
    assert kinds({**base, "use_sliding_window": False}) == ["full"] * 4
    assert kinds({**base, "use_sliding_window": True}) == ["full", "full", "full", "sliding"]


def test_pattern_from_layer_types_from_a_stated_period_and_from_the_class() -> None:
    base = {"model_type": "gemma3_text", **TINY, "num_hidden_layers": 6, "sliding_window": 8}
    assert kinds(base) == ["sliding"] * 5 + ["full"]
    assert kinds({**base, "sliding_window_pattern": 2}) == ["sliding", "full"] * 3
    assert kinds({**base, "layer_types": ["full_attention"] * 6}) == ["full"] * 6


def test_llama4_full_where_positions_are_not_rotated() -> None:
    base = {"model_type": "llama4_text", **TINY, "num_key_value_heads": 2, "attention_chunk_size": 16}
    assert kinds(base) == ["chunked", "chunked", "chunked", "full"]
    assert kinds({**base, "no_rope_layers": [0, 1, 1, 0]}) == ["full", "chunked", "chunked", "full"]
    assert kinds({**base, "attention_chunk_size": None}) == ["full"] * 4


def test_shared_tail_reads_the_last_unshared_layer_of_its_own_type() -> None:
    types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = {
        "model_type": "gemma3n_text", **TINY, "num_hidden_layers": 5, "num_key_value_heads": 1,
        "sliding_window": 8, "num_kv_shared_layers": 2, "layer_types": types,
    }  # fmt: skip
    model = from_config(config)
    assert [layer.kind for layer in model.layers] == ["sliding", "sliding", "full", "shared", "shared"]
    assert [layer.parts[0].source for layer in model.layers[3:]] == [1, 2]
    with pytest.raises(ValueError, match="layer 1 shares the cache of a sliding_attention layer, but none is there"):
        from_config({**config, "num_kv_shared_layers": 4, "layer_types": ["full_attention", *types[1:]]})


def test_gemma4_full_layers_have_their_own_width_and_head_count() -> None:
    config = {
        "model_type": "gemma4_text", **TINY, "num_hidden_layers": 6, "num_key_value_heads": 4, "head_dim": 16,
        "sliding_window": 8, "global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    }  # fmt: skip
    model = from_config(config)
    assert model.bytes_per_token == 2 * 1 * 32 * 2
    assert from_config({**config, "attention_k_eq_v": False}).bytes_per_token == 2 * 4 * 32 * 2
    assert model.bytes_per_token_short - model.bytes_per_token == 5 * 2 * 4 * 16 * 2


# states and hybrids


def test_falcon_h1_layers_hold_attention_and_state_side_by_side() -> None:
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128, "mamba_d_state": 16}
    config = {"model_type": "falcon_h1", **TINY, "num_key_value_heads": 2, **mamba}
    assert kinds(config) == ["full+recurrent"] * 4
    conv, state = (128 + 2 * 16) * 3 * 2, 4 * 32 * 16 * 4
    assert from_config(config).state_bytes == 4 * (conv + state)


def test_nemotron_h_layers_without_a_cache_stay_in_the_list() -> None:
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8, "conv_kernel": 4}
    config = {"model_type": "nemotron_h", **TINY, "num_key_value_heads": 2, "hybrid_override_pattern": "M-*E", **mamba}
    assert kinds(config) == ["recurrent", "none", "full", "none"]


def test_kimi_linear_counts_layers_from_one() -> None:
    linear = {
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
        "num_heads": 2,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
    }
    config = {
        "model_type": "kimi_linear",
        **TINY,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "linear_attn_config": linear,
    }
    assert kinds(config) == ["recurrent", "recurrent", "recurrent", "mla"]
    with pytest.raises(ValueError, match="must name each layer once, from 1"):
        from_config({**config, "linear_attn_config": {**linear, "kda_layers": [0, 1, 2]}})


def test_state_and_convolution_formats_are_chosen_apart() -> None:
    config = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 1, "state_size": 4, "vocab_size": 9}
    conv, state = 128 * 3, 128 * 4
    assert from_config(config).state_bytes == conv * 2 + state * 4
    assert from_config(config, state_format="bf16", conv_format="fp32").state_bytes == conv * 4 + state * 2


# multimodal


def test_cross_attention_holds_the_image_tokens_and_nothing_per_text_token() -> None:
    text = {"model_type": "mllama_text_model", **TINY, "num_key_value_heads": 2, "cross_attention_layers": [1]}
    config = {"model_type": "mllama", "text_config": text}
    assert kinds(config) == ["full", "cross", "full", "full"]
    row = 2 * 2 * 8 * 2
    with_image = from_config(config, image_tokens=6404)
    assert with_image.bytes_per_token == 3 * row
    assert with_image.bytes_at(10) - from_config(config).bytes_at(10) == 6404 * row


def test_a_wrapper_is_sized_by_its_text_part() -> None:
    text = {"model_type": "llama", **TINY, "num_key_value_heads": 2}
    inside = from_config({"model_type": "llava", "text_config": text})
    assert inside.layers == from_config(text).layers
    assert inside.model_type == "llava"
    assert from_config({**text, "model_type": "llava"}).layers == inside.layers  # the original, flat layout
    assert any("sized by the text decoder" in note for note in inside.notes)


def test_a_wrapper_may_leave_the_shape_to_its_text_class_and_every_such_value_is_noted() -> None:
    # llava-1.5-7b-hf states no shape at all: a Llama of the class's defaults
    model = from_config({"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32_064}})
    assert model.bytes_per_token == 32 * 2 * 32 * 128 * 2
    assert sum("the default of transformers' llama class" in note for note in model.notes) == 4


def test_every_wrapper_names_a_known_text_family() -> None:
    assert {family for family in WRAPPERS.values() if family} <= FAMILIES.keys()


# longest position


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 4096),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, 4096),
        ({"type": "linear", "factor": 2.0}, 8192),
        ({"type": "dynamic", "factor": 4.0}, 16_384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16_384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, 4096),
        ({"type": "linear", "factor": "2"}, 4096),
    ],
)
def test_rope_scaling(scaling: dict | None, longest: int) -> None:
    config = {"model_type": "opt", **TINY, "max_position_embeddings": 4096, "rope_scaling": scaling}
    assert from_config(config).max_position == longest
