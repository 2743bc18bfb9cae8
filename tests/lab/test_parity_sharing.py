"""Parity of layers that read another layer's cache with transformers, every fact changed once."""

from kvlab.lab.parity import run_parity

GEMMA3N = {
    "model_type": "gemma3n_text",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 32_000,
    "vocab_size_per_layer_input": 30_000,
    "max_position_embeddings": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 512,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
}


def test_gemma3n_is_transformers_and_every_changed_fact_is_seen():
    report = run_parity(GEMMA3N, seed=1, mutations=True)
    assert report.shrunk.kept_layers == (0, 1, 2, 3, 4, 5)
    # far within the looser tolerance of its family
    assert all(m.error <= 2e-4 for m in report.modes), report.modes
    assert {m.mode: m.error for m in report.mutations if not m.error > 4e-3} == {}
    assert report.passed
    tried = {m.mode for m in report.mutations}
    assert {"Attention.value_norm left out", "AltUpLayer.sparsity left out", "Attention.window + 1"} <= tried
