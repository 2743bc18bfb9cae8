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
    | {"model_type": "glm_moe_dsa", "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
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


def test_compressed_entries_beside_windows():
    """DeepSeek-V4 with a layer of each kind, one of them routed by a table."""
    v4 = {
        "model_type": "deepseek_v4",
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 256,
        "o_groups": 4,
        "o_lora_rank": 128,
        "moe_intermediate_size": 512,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "num_hash_layers": 1,
        # most norms here read what another norm has made: eps must be large to show
        "rms_norm_eps": 1e-3,
        "sliding_window": 128,
        "index_n_heads": 64,
        "index_head_dim": 64,
        "compress_ratios": [0, 4, 128, 4, 0],
        "vocab_size": 32_000,
        "max_position_embeddings": 8192,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 512},
    }
    report = run_parity(v4, seed=0, mutations=True)
    assert report.shrunk.kept_layers == (0, 1, 2, 3)
    assert report.entropy_fraction < 0.5
    assert all(m.error <= 1e-4 for m in report.modes), report.modes
    assert {m.mode: m.error for m in report.mutations if not m.error > 20 * m.tolerance} == {}
    tried = {m.mode for m in report.mutations}
    assert {f"CompressedAttention.{name} left out" for name in ("window", "rope", "compressor", "index")} <= tried
    assert {"EntryIndex.top_k - 1", "Hyper.iterations + 1", "Hyper.floor doubled", "MoE.limit + 10 %"} <= tried
    assert "model.layers.1.self_attn.sinks set to one" in tried
    # tokens of a window that is still open, those of the window before it, and both again for the indexer
    arrays = {f"{who}{what}_{of}" for who in ("", "index_") for what in ("open", "overlap") for of in ("kv", "gate")}
    assert {f"{array} not carried over a chunk boundary" for array in arrays} <= tried
