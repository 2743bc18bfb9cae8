"""A family is a row of facts: what a config.json says, what its class supplies, and what is refused."""

import json
from pathlib import Path

import pytest

from kvlab.models.config import ModelConfig, RopeConfig

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


def test_llama_with_everything_left_to_its_class():
    config = read()
    assert (config.head_dim, config.scale) == (8, 8**-0.5)
    assert (config.norm_eps, config.activation, config.tie_embeddings) == (1e-6, "silu", False)
    assert config.rope == RopeConfig("default", 10_000.0)
    assert config.windows == (0, 0, 0) and config.rotated == (True, True, True) and config.layer_groups == (0, 0, 0)
    assert not (config.qkv_bias or config.out_bias or config.mlp_bias or config.qk_norm)


def test_head_dim_is_the_configs_own_where_it_says_so():
    config = read(head_dim=10)
    assert (config.head_dim, config.scale) == (10, 10**-0.5)


def test_without_kv_heads_every_query_head_has_its_own():
    assert read(num_key_value_heads=...).num_kv_heads == 6


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
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == biases


def test_only_qwen3_norms_queries_and_keys():
    assert [read(model_type=t).qk_norm for t in ("llama", "mistral", "qwen2", "qwen3")] == [False, False, False, True]


@pytest.mark.parametrize(("given", "window"), [({}, 4096), ({"sliding_window": 9}, 9), ({"sliding_window": None}, 0)])
def test_mistral_has_one_window_for_all_layers_or_none(given, window):
    assert read(model_type="mistral", **given).windows == (window,) * 3


@pytest.mark.parametrize(
    ("given", "windows", "groups"),
    [
        ({"sliding_window": 9}, (0, 0, 0), (0, 0, 0)),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}, (0, 9, 9), (0, 1, 1)),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0}, (9, 9, 9), (0, 0, 0)),
        (
            {"sliding_window": 9, "use_sliding_window": True}
            | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            (9, 0, 9),
            (1, 0, 1),
        ),
    ],
)
def test_qwen_windows_count_only_where_they_are_switched_on(given, windows, groups):
    config = read(model_type="qwen2", **given)
    assert (config.windows, config.layer_groups) == (windows, groups)


def test_smollm3_leaves_every_fourth_layer_unrotated():
    config = read(model_type="smollm3", num_hidden_layers=9)
    assert config.rotated == (True, True, True, False, True, True, True, False, True)
    assert config.rope.theta == 2_000_000.0


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("given", "rope"),
    [
        ({"rope_theta": 500.0}, RopeConfig("default", 500.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, RopeConfig("default", 500.0)),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, RopeConfig("linear", 10_000.0, 4.0)),
        ({"rope_scaling": LLAMA3 | {"rope_type": "llama3"}}, RopeConfig("llama3", 10_000.0, 8.0, 1.0, 4.0, 32)),
        (
            {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 500.0}},
            RopeConfig("llama3", 500.0, 8.0, 1.0, 4.0, 32),
        ),
    ],
)
def test_rotary_rules_in_the_old_and_the_new_spelling(given, rope):
    assert read(**given).rope == rope


def test_end_tokens_are_one_or_several_or_none():
    assert [read(eos_token_id=e).eos_token_ids for e in (None, 2, [2, 7])] == [(), (2,), (2, 7)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba': the engine runs llama, mistral, qwen2, qwen3, smollm3"),
        ({"model_type": ...}, "model_type None"),
        ({"hidden_size": ...}, "hidden_size None"),
        ({"vocab_size": 0}, "vocab_size 0"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4: must divide the 6 query heads"),
        ({"hidden_act": "xielu"}, "hidden_act 'xielu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: 'linear' needs a factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers: 1 entries for 3 layers"),
    ],
)
def test_what_the_engine_cannot_run_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match="^" + message.replace("(", r"\(")):
        read(**changes)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared configs next to the project")
def test_every_shared_config_of_another_family_is_refused_with_its_name():
    for path in sorted(SHARED.glob("*__*.json")):
        config = json.loads(path.read_text())
        if config["model_type"] not in ("llama", "mistral", "qwen2", "qwen3", "smollm3"):
            with pytest.raises(ValueError, match=f"model_type '{config['model_type']}'"):
                ModelConfig.from_hf(config)
