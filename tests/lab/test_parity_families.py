"""Parity of every mechanism the engine has, on configs of our own, and the proof that parity sees each of them."""

from functools import cache

import pytest
import torch

from kvlab.lab.parity import Report, compare, mutate, run_parity
from kvlab.lab.parity.oracle import Oracle
from kvlab.lab.parity.shrink import shrink
from kvlab.lab.parity.weights import entropy_fraction
from kvlab.models.facts import ModelConfig
from kvlab.models.load import from_state_dict

BASE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
LLAMA3 = {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048}
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
    "smollm3": {"model_type": "smollm3", "tie_word_embeddings": True},
}


@cache
def report_of(family: str) -> Report:
    return run_parity(BASE | FAMILIES[family], seed=3, mutations=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_transformers_and_every_changed_fact_is_seen(family):
    report = report_of(family)
    assert report.entropy_fraction < 0.5
    errors = {m.mode: m.error for m in report.modes}
    assert list(errors) == ["whole prefill", "decode", "chunked prefill", "ragged batch", "preempt and resume"]
    assert all(error <= 1e-4 for error in errors.values()), errors
    # not just outside the tolerance: far outside, so that it cannot pass by chance
    weak = {m.mode: m.error for m in report.mutations if not m.error > 20 * m.tolerance}
    assert weak == {}
    assert report.passed


def changes_tried(family: str) -> set[str]:
    return {m.mode for m in report_of(family).mutations}


def test_each_mechanism_has_its_own_mutation():
    every = {"Norm.eps doubled", "Attention.scale + 10 %", "Rope.theta + 10 %", "KV heads in another order"}
    llama = changes_tried("llama, head_dim, all biases")
    layer = "model.layers.0."
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert f"{layer}self_attn.{name}.bias zeroed" in llama
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert f"{layer}mlp.{name}.bias zeroed" in llama
    assert every | {"head tied to the embedding"} <= llama
    windows = changes_tried("qwen3, biases, alternating windows")
    assert {f"Attention.window {how}" for how in ("+ 1", "- 1", "left out")} | {"Attention.qk_norm left out"} <= windows
    scaled = changes_tried("llama, llama3 scaling")
    assert {"Rope.kind left out", "Rope.factor + 10 %", "Rope.original_max_position times 8"} <= scaled
    assert "every layer rotated" in changes_tried("smollm3")


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
