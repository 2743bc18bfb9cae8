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
}  # fmt: skip
REPORTS = Reports(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_transformers_and_every_changed_fact_is_seen(family):
    assert_parity(REPORTS(family))


def test_each_fact_of_the_routing_has_its_own_mutation():
    routing = {"Router.top_k + 1", "Router.top_k - 1", "Router.normalise flipped", "Router.score changed"}
    assert routing <= REPORTS.changes("qwen3_moe, not normalised, one dense layer")
    assert REPORTS("qwen3_moe, not normalised, one dense layer").shrunk.kept_layers == (0, 1, 2)
