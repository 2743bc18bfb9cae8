"""Parity of every mechanism the engine has, on configs of our own, and the proof that parity sees each of them."""

import pytest
import torch
from parity_check import BASE, Reports, assert_parity

from kvlab.lab.parity import compare, mutate
from kvlab.lab.parity.oracle import Oracle
from kvlab.lab.parity.shrink import shrink
from kvlab.lab.parity.weights import entropy_fraction
from kvlab.models.facts import ModelConfig
from kvlab.models.load import from_state_dict

LLAMA3 = {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LONGROPE = {
    "rope_type": "longrope",
    "long_factor": [1.0 + i for i in range(24)],
    "short_factor": [1.0 + i / 16 for i in range(24)],
}
LATE = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 8}
ALTERNATING = ["full_attention", "sliding_attention", "sliding_attention"] * 4

FAMILIES = {
    "llama, mha, tied": {"model_type": "llama", "num_key_value_heads": 16, "tie_word_embeddings": True},
    "llama, mqa, linear scaling": {
        "model_type": "llama",
        "num_key_value_heads": 1,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "llama, llama3 scaling": {
        "model_type": "llama",
        "rope_theta": 500_000.0,
        "rope_scaling": LLAMA3 | {"rope_type": "llama3"},
    },
    "llama, head_dim, all biases": {"model_type": "llama", "head_dim": 96, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0},
    "qwen2, late windows": {"model_type": "qwen2"} | LATE,
    "qwen3": {"model_type": "qwen3", "head_dim": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    "qwen3, biases, alternating windows": {"model_type": "qwen3", "head_dim": 64, "attention_bias": True}
    | LATE
    | {"layer_types": ALTERNATING},
    "mistral": {"model_type": "mistral", "sliding_window": 1024},
    "mistral, no window, head_dim": {"model_type": "mistral", "sliding_window": None, "head_dim": 128},
    "llama, yarn": {"model_type": "llama", "rope_scaling": YARN},
    "qwen2, yarn with weights and exact bounds": {
        "model_type": "qwen2",
        "rope_scaling": YARN | {"truncate": False, "mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 16.0},
    },
    "phi3, longrope on part of a head, window": {
        "model_type": "phi3",
        "rope_scaling": LONGROPE,
        "original_max_position_embeddings": 1024,
        "partial_rotary_factor": 0.75,
        "sliding_window": 512,
    },
    "olmo2": {"model_type": "olmo2"},
    "starcoder2, window": {"model_type": "starcoder2", "sliding_window": 1024, "tie_word_embeddings": True},
    "glm4": {"model_type": "glm4", "head_dim": 128},
    "stablelm, side by side": {"model_type": "stablelm", "use_parallel_residual": True, "use_qkv_bias": True},
    "phi": {"model_type": "phi"},
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "attention_multiplier": 0.0078125,
        "residual_multiplier": 0.22,
    },
    "gemma": {"model_type": "gemma", "head_dim": 256, "tie_word_embeddings": True},
    "smollm3": {"model_type": "smollm3", "tie_word_embeddings": True},
}


REPORTS = Reports(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_transformers_and_every_changed_fact_is_seen(family):
    assert_parity(REPORTS(family))


def test_each_mechanism_has_its_own_mutation():
    every = {"Norm.eps doubled", "Attention.scale + 10 %", "Rope.theta + 10 %", "KV heads in another order"}
    llama = REPORTS.changes("llama, head_dim, all biases")
    layer = "model.layers.0."
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert f"{layer}self_attn.{name}.bias zeroed" in llama
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert f"{layer}mlp.{name}.bias zeroed" in llama
    assert every | {"head tied to the embedding"} <= llama
    windows = REPORTS.changes("qwen3, biases, alternating windows")
    assert {f"Attention.window {how}" for how in ("+ 1", "- 1", "left out")} | {"Attention.qk_norm left out"} <= windows
    scaled = REPORTS.changes("llama, llama3 scaling")
    assert {"Rope.kind left out", "Rope.factor + 10 %", "Rope.original_max_position times 8"} <= scaled
    yarn = {
        "Rope.beta_fast times 8",
        "Rope.beta_slow times 8",
        "Rope.attention_factor + 10 %",
        "Rope.truncate left out",
    }
    assert yarn <= REPORTS.changes("llama, yarn")
    assert "Rope.divisors + 10 %" in REPORTS.changes("phi3, longrope on part of a head, window")
    assert {"Norm.offset left out", "Embedding.scale + 10 %"} <= REPORTS.changes("gemma")
    assert {"Branch.scale + 10 %", "Head.scale + 10 %"} <= REPORTS.changes("granite")
    assert "every layer rotated" in REPORTS.changes("smollm3")


def test_with_transformers_own_initialisation_parity_would_be_blind():
    """The reason for `parity.weights`: attention near uniform, biases zero, norms one."""
    small = shrink(BASE | FAMILIES["qwen2"]).config
    torch.manual_seed(0)
    oracle, texts = Oracle(small), compare.prompts(0)
    assert entropy_fraction(oracle.attentions(texts[0])) > 0.95
    model, wanted = from_state_dict(small, oracle.state()), oracle.logits(texts[0])
    unseen = set()
    for change, mutant in mutate.mutants(ModelConfig.from_hf(small), oracle.state()):
        got = compare.whole_prefill(mutate.mutated(model, mutant), texts)[0]
        if compare.error(got, wanted) <= compare.TOLERANCE:
            unseen.add(change)
    attention = "model.layers.0.self_attn."
    assert {f"{attention}{name}_proj.bias zeroed" for name in "qkv"} <= unseen
    assert "model.layers.0.input_layernorm.weight set to one" in unseen
