"""Parity of latent attention with transformers, on configs of our own, with every fact changed once."""

import pytest

from kvlab.lab.parity import run_parity

BASE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 256,
    "q_lora_rank": 384,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}
EXPERTS = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 384,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
}
YARN = {"type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.8, "original_max_position_embeddings": 512}
INDEXER = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 512}
GROUPS = {"n_group": 8, "topk_group": 3}

FAMILIES = {
    "deepseek_v2, queries from the stream": EXPERTS | {"model_type": "deepseek_v2", "q_lora_rank": None},
    "deepseek_v2, best groups, yarn, biases": EXPERTS
    | GROUPS
    | {
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy",
        "rope_scaling": YARN,
        "attention_bias": True,
    },
    "deepseek_v3, yarn": EXPERTS | GROUPS | {"model_type": "deepseek_v3", "rope_scaling": YARN},
    "glm4_moe_lite": EXPERTS | {"model_type": "glm4_moe_lite", "routed_scaling_factor": 1.8},
    "deepseek_v32": EXPERTS | GROUPS | INDEXER | {"model_type": "deepseek_v32", "rope_scaling": YARN},
    "glm_moe_dsa, choices shared": EXPERTS
    | INDEXER
    | {"model_type": "glm_moe_dsa", "indexer_types": ["full", "full", "shared", "shared", "full", "shared"]},
    "minicpm3": {"model_type": "minicpm3", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_transformers_and_every_changed_fact_is_seen(family):
    report = run_parity(BASE | FAMILIES[family], seed=2, mutations=True)
    assert report.entropy_fraction < 0.5
    assert all(m.error <= 1e-4 for m in report.modes), report.modes
    weak = {m.mode: m.error for m in report.mutations if not m.error > 20 * m.tolerance}
    assert weak == {}
    assert report.passed
    tried = {m.mode for m in report.mutations}
    layer = "model.layers.0.self_attn."
    assert {"LatentAttention.scale + 10 %", "LatentAttention.rope left out", "Rope.interleaved flipped"} <= tried
    assert f"{layer}kv_a_layernorm.weight set to one" in tried
    if "yarn" in family:
        assert {"Rope.kind left out", "Rope.factor + 10 %", "Rope.attention_factor + 10 %"} <= tried
    if "index_topk" in BASE | FAMILIES[family]:
        assert {f"Indexer.top_k {how}" for how in ("+ 1", "- 1", "left out")} | {"Indexer.rope left out"} <= tried
        assert f"{layer}indexer.k_norm.bias zeroed" in tried
    if "biases" in family:
        assert {f"{layer}{name}.bias zeroed" for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")} <= tried
