"""A family is a row of facts: what a config.json says, what its class supplies, and what is refused."""

import json
from pathlib import Path

import pytest

from kvlab.models.facts import AttentionFacts, MLPFacts, ModelConfig, RopeFacts
from kvlab.models.families import family_name

SHARED = Path(__file__).parents[3] / "shared" / "configs"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 64,
}


def read(**changes) -> ModelConfig:
    config = LLAMA | changes
    return ModelConfig.from_hf({k: v for k, v in config.items() if v is not ...})


def attention(config: ModelConfig, layer: int = 0) -> AttentionFacts:
    return config.layers[layer].branches[0].module


def mlp(config: ModelConfig) -> MLPFacts:
    return config.layers[0].branches[1].module


def windows(config: ModelConfig) -> tuple[int, ...]:
    return tuple(attention(config, i).window for i in range(config.num_layers))


def rotated(config: ModelConfig) -> tuple[bool, ...]:
    return tuple(attention(config, i).rope is not None for i in range(config.num_layers))


def test_llama_with_everything_left_to_its_class():
    config = read()
    heads = attention(config)
    assert (heads.num_query_heads, heads.num_kv_heads, heads.key_dim, heads.value_dim) == (6, 2, 8, 8)
    assert (heads.scale, heads.rope) == (8**-0.5, RopeFacts("default", 10_000.0))
    assert (config.head.norm.eps, config.head.tied, mlp(config).activation) == (1e-6, False, "silu")
    assert windows(config) == (0, 0, 0) and rotated(config) == (True, True, True)
    assert not (heads.qkv_bias or heads.out_bias or mlp(config).bias or heads.qk_norm)


def test_head_dim_is_the_configs_own_where_it_says_so():
    heads = attention(read(head_dim=10))
    assert (heads.key_dim, heads.scale) == (10, 10**-0.5)


def test_without_kv_heads_every_query_head_has_its_own():
    assert attention(read(num_key_value_heads=...)).num_kv_heads == 6


@pytest.mark.parametrize(
    ("model_type", "given", "biases"),
    [
        ("llama", {"attention_bias": True}, (True, True, False)),
        ("llama", {"mlp_bias": True}, (False, False, True)),
        ("qwen2", {}, (True, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, False)),
        ("mistral", {"attention_bias": True}, (False, False, False)),
    ],
)
def test_biases_of_each_family(model_type, given, biases):
    config = read(model_type=model_type, **given)
    assert (attention(config).qkv_bias, attention(config).out_bias, mlp(config).bias) == biases


def test_of_these_only_qwen3_norms_queries_and_keys():
    normed = [attention(read(model_type=t)).qk_norm is not None for t in ("llama", "mistral", "qwen2", "qwen3")]
    assert normed == [False, False, False, True]


@pytest.mark.parametrize(("given", "window"), [({}, 4096), ({"sliding_window": 9}, 9), ({"sliding_window": None}, 0)])
def test_mistral_has_one_window_for_all_layers_or_none(given, window):
    assert windows(read(model_type="mistral", **given)) == (window,) * 3


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"sliding_window": 9}, (0, 0, 0)),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}, (0, 9, 9)),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0}, (9, 9, 9)),
        (
            {"sliding_window": 9, "use_sliding_window": True}
            | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            (9, 0, 9),
        ),
    ],
)
def test_qwen_windows_count_only_where_they_are_switched_on(given, expected):
    assert windows(read(model_type="qwen2", **given)) == expected


def test_smollm3_leaves_every_fourth_layer_unrotated():
    config = read(model_type="smollm3", num_hidden_layers=9)
    assert rotated(config) == (True, True, True, False, True, True, True, False, True)
    assert attention(config).rope.theta == 2_000_000.0


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("given", "rope"),
    [
        ({"rope_theta": 500.0}, RopeFacts("default", 500.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, RopeFacts("default", 500.0)),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, RopeFacts("linear", 10_000.0, 4.0)),
        ({"rope_scaling": LLAMA3 | {"rope_type": "llama3"}}, RopeFacts("llama3", 10_000.0, 8.0, 1.0, 4.0, 32)),
        (
            {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 500.0}},
            RopeFacts("llama3", 500.0, 8.0, 1.0, 4.0, 32),
        ),
    ],
)
def test_rotary_rules_in_the_old_and_the_new_spelling(given, rope):
    assert attention(read(**given)).rope == rope


def test_end_tokens_are_one_or_several_or_none():
    assert [read(eos_token_id=e).eos_token_ids for e in (None, 2, [2, 7])] == [(), (2,), (2, 7)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "whisper"}, "model_type 'whisper': the engine runs "),
        ({"model_type": ...}, "model_type None"),
        ({"hidden_size": ...}, "hidden_size None"),
        ({"vocab_size": 0}, "vocab_size 0"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4: must divide the 6 query heads"),
        ({"hidden_act": "xielu"}, "hidden_act 'xielu'"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope_type 'spiral'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: 'linear' needs a factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers: 1 entries for 3 layers"),
    ],
)
def test_what_the_engine_cannot_run_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match="^" + message.replace("(", r"\(")):
        read(**changes)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared configs next to the project")
def test_every_shared_config_of_a_family_without_a_row_is_refused_with_its_name():
    refused = 0
    for path in sorted(SHARED.glob("*__*.json")):
        config = json.loads(path.read_text())
        try:
            family_name(config)
        except ValueError as error:
            assert str(error).startswith(f"model_type '{config['model_type']}': the engine runs ")
            refused += 1
    assert refused
