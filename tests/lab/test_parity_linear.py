"""Parity of lightning attention and RWKV with transformers, every fact changed once."""

import pytest

from kvlab.lab.parity import run_parity

MINIMAX = {
    "model_type": "minimax",
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 512,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "rope_theta": 10_000.0,
    "linear_attn_alpha_factor": 3.5,
    "full_attn_alpha_factor": 2.5,
    "mlp_alpha_factor": 1.5,
    "full_attn_beta_factor": 0.75,
    "linear_attn_beta_factor": 1.25,
}
RWKV = {"model_type": "rwkv", "hidden_size": 1024, "num_hidden_layers": 4, "vocab_size": 32_000, "context_length": 512}
FAMILIES = {"minimax": MINIMAX, "rwkv": RWKV}
# a stream that passes through a norm at once keeps nothing of its scale but what the norm's eps leaves
WEAK = {"Embedding.scale + 10 %"}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_transformers_and_every_changed_fact_is_seen(family):
    report = run_parity(FAMILIES[family], seed=0, mutations=True)
    assert all(m.error <= 1e-4 for m in report.modes), report.modes
    assert {m.mode for m in report.mutations if not m.error > 20 * m.tolerance} <= WEAK
    assert report.passed
    assert "state not carried over a chunk boundary" in {m.mode for m in report.mutations}


@pytest.mark.parametrize("model_type", ["kvlab_linear", "kvlab_retnet"])
def test_native_attention_is_sharp_and_a_model_without_any_says_so(model_type):
    shape = MINIMAX | {"model_type": model_type, "num_key_value_heads": 16, "num_hidden_layers": 3}
    between = run_parity(shape | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]})
    alone = run_parity(shape | {"layer_types": ["linear_attention"] * 3})
    assert between.passed and alone.passed
    assert 0 < between.entropy_fraction < 0.5
    assert alone.entropy_fraction is None
