"""Parity of windows and chunks between full layers, every fact changed once."""

import pytest
from parity_check import Reports, assert_parity

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048}
FAMILIES = {
    "gemma2": {"model_type": "gemma2", "head_dim": 256, "tie_word_embeddings": True, "sliding_window": 1024},
    "gemma3, a full layer in three": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "tie_word_embeddings": True,
        "sliding_window": 1024,
        "sliding_window_pattern": 3,
        "rope_theta": 1_000_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "olmo3, full layers stretched": {
        "model_type": "olmo3",
        "sliding_window": 512,
        "rope_parameters": {
            "full_attention": YARN | {"rope_theta": 500_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
        },
    },
    "cohere2": {"model_type": "cohere2", "tie_word_embeddings": True, "sliding_window": 1024, "attention_bias": True},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "head_dim": 64,
        "rope_scaling": YARN | {"truncate": False},
    },
    "llama4, experts in every second layer": {
        "model_type": "llama4_text",
        "num_local_experts": 4,
        "intermediate_size_mlp": 1024,
        "interleave_moe_layer_step": 2,
        "rope_scaling": LLAMA3 | {"rope_type": "llama3"},
    },
}
REPORTS = Reports(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_transformers_and_every_changed_fact_is_seen(family):
    assert_parity(REPORTS(family))


def test_each_mechanism_has_its_own_mutation():
    window = {f"Attention.window {how}" for how in ("+ 1", "- 1", "left out")}
    assert window | {"Attention.softcap + 10 %", "Head.softcap + 10 %"} <= REPORTS.changes("gemma2")
    assert window | {"Attention.sinks left out", "MoE.limit + 10 %"} <= REPORTS.changes("gpt_oss")
    assert window | {"every layer rotated", "Head.scale + 10 %"} <= REPORTS.changes("cohere2")
    chunk = {f"Attention.chunk {how}" for how in ("+ 1", "- 1", "left out")}
    llama4 = REPORTS.changes("llama4, experts in every second layer")
    assert chunk | {"Attention.temperature left out", "Temperature.floor + 1", "Router.on_input flipped"} <= llama4
