"""Parity of gated delta nets, Kimi delta attention and short convolutions with transformers, every fact changed once."""

import pytest

from kvlab.lab.parity import run_parity

BASE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
DELTA = {
    "head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "rope_theta": 10_000.0,
}
EXPERTS = {
    "moe_intermediate_size": 384,
    "shared_expert_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}

FAMILIES = {
    "qwen3_next, one dense layer": DELTA
    | EXPERTS
    | {"model_type": "qwen3_next", "num_hidden_layers": 8, "mlp_only_layers": [3], "attention_bias": True},
    "qwen3_5, every second layer": DELTA
    | {"model_type": "qwen3_5_text", "num_hidden_layers": 6, "full_attention_interval": 2, "tie_word_embeddings": True},
}
CONVOLUTIONS = {"conv_L_cache": 3, "num_hidden_layers": 6, "layer_types": ["conv", "full_attention", "conv"] * 2}
KIMI = {
    "linear_attn_config": {
        "full_attn_layers": [3, 6],
        "kda_layers": [1, 2, 4, 5],
        "num_heads": 8,
        "head_dim": 64,
        "short_conv_kernel_size": 4,
    },
    "num_key_value_heads": 16,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_expert_group": 1,
    "num_shared_experts": 1,
}
FAMILIES |= {
    "lfm2, biases": CONVOLUTIONS | {"model_type": "lfm2", "conv_bias": True, "tie_word_embeddings": True},
    "lfm2_moe": CONVOLUTIONS | EXPERTS | {"model_type": "lfm2_moe", "num_dense_layers": 1},
    "kimi_linear": KIMI | EXPERTS | {"model_type": "kimi_linear", "num_hidden_layers": 6},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_transformers_and_every_changed_fact_is_seen(family):
    report = run_parity(BASE | FAMILIES[family], seed=2, mutations=True)
    assert all(m.error <= 1e-4 for m in report.modes), report.modes
    weak = {m.mode: m.error for m in report.mutations if not m.error > 20 * m.tolerance}
    assert weak == {}
    assert report.passed
    assert "conv not carried over a chunk boundary" in {m.mode for m in report.mutations}
