"""Parity of mixtures of experts, every fact of their routing changed once."""

import pytest
from parity_check import Reports, assert_parity

EXPERTS = {"moe_intermediate_size": 384, "num_experts_per_tok": 4}
FAMILIES = {
    "mixtral, window": {
        "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 1024,
    },
    "qwen3_moe, not normalised, one dense layer": EXPERTS
    | {"model_type": "qwen3_moe", "num_experts": 16, "mlp_only_layers": [1], "head_dim": 128},
    "qwen2_moe, shared expert behind a gate": EXPERTS
    | {
        "model_type": "qwen2_moe", "num_experts": 16, "num_key_value_heads": 16, "norm_topk_prob": True,
        "shared_expert_intermediate_size": 512,
    },
    "glm4_moe, corrected choice, first layer dense": EXPERTS
    | {
        "model_type": "glm4_moe", "n_routed_experts": 16, "first_k_dense_replace": 1, "routed_scaling_factor": 1.8,
        "use_qk_norm": True, "attention_bias": True, "head_dim": 64,
    },
}  # fmt: skip
REPORTS = Reports(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_transformers_and_every_changed_fact_is_seen(family):
    assert_parity(REPORTS(family))


def test_each_fact_of_the_routing_has_its_own_mutation():
    routing = {"Router.top_k + 1", "Router.top_k - 1", "Router.normalise flipped", "Router.score changed"}
    assert routing <= REPORTS.changes("qwen3_moe, not normalised, one dense layer")
    corrected = {"model.layers.1.mlp.gate.e_score_correction_bias zeroed", "Router.scale + 10 %"}
    assert corrected <= REPORTS.changes("glm4_moe, corrected choice, first layer dense")
    assert "MoE.shared_gate left out" in REPORTS.changes("qwen2_moe, shared expert behind a gate")
    assert REPORTS("qwen3_moe, not normalised, one dense layer").shrunk.kept_layers == (0, 1, 2)
