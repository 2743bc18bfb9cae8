"""Parity of Mamba, Mamba-2 and the hybrids that hold them, on configs of our own with every factor in use."""

from functools import cache

import pytest

from kvlab.lab.parity import Report, run_parity
from kvlab.lab.parity.plain import NOTE
from kvlab.lab.parity.shrink import shrink

BASE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
}
PURE = {"hidden_size": 512, "vocab_size": 32_000, "num_hidden_layers": 24, "tie_word_embeddings": False}
FACTORS = {"embedding_multiplier": 5.0, "residual_multiplier": 0.6, "attention_multiplier": 0.2, "logits_scaling": 3.0}
FALCON = {"embedding_multiplier": 5.0, "lm_head_multiplier": 0.3, "key_multiplier": 0.7, "attention_in_multiplier": 1.3,
          "attention_out_multiplier": 0.8, "ssm_in_multiplier": 0.9, "ssm_out_multiplier": 1.4,
          "mlp_multipliers": [0.8, 1.2], "ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 0.9]}  # fmt: skip

FAMILIES = {
    "mamba": {**PURE, "model_type": "mamba", "tie_word_embeddings": True},
    "mamba, biases": {**PURE, "model_type": "mamba", "use_bias": True, "use_conv_bias": False, "conv_kernel": 3},
    "falcon_mamba": {**PURE, "model_type": "falcon_mamba", "state_size": 16},
    "mamba2": {**PURE, "model_type": "mamba2", "num_heads": 16, "n_groups": 8, "use_bias": True},
    "jamba": {**BASE, "model_type": "jamba", "num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 2},
    "bamba": {**BASE, "model_type": "bamba", "num_hidden_layers": 3, "attn_layer_indices": [1], "attention_bias": True,
              "mlp_bias": True, "mamba_n_heads": 16, "mamba_n_groups": 4, "mamba_proj_bias": True},
    "granitemoehybrid": {**BASE, **FACTORS, "model_type": "granitemoehybrid", "num_hidden_layers": 2,
                         "layer_types": ["mamba", "attention"], "num_local_experts": 16, "num_experts_per_tok": 4,
                         "mamba_n_heads": 16},
    "granitemoehybrid, no experts, rotated": {
        **BASE, "model_type": "granitemoehybrid", "num_hidden_layers": 2, "layer_types": ["attention", "mamba"],
        "num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_heads": 16, "attention_multiplier": 0.2},
    "falcon_h1": {**BASE, **FALCON, "model_type": "falcon_h1", "num_hidden_layers": 4, "head_dim": 64,
                  "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2, "mamba_n_heads": 16},
    "nemotron_h": {**BASE, "model_type": "nemotron_h", "num_hidden_layers": 5, "hybrid_override_pattern": "M-*EM",
                   "moe_latent_size": 128, "moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 512,
                   "n_routed_experts": 16, "num_experts_per_tok": 4, "routed_scaling_factor": 2.5},
    "zamba2": {**BASE, "model_type": "zamba2", "num_hidden_layers": 6, "num_key_value_heads": 8, "num_mem_blocks": 2,
               "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid", "mamba"], "use_mem_rope": True,
               "use_shared_attention_adapter": True, "n_mamba_heads": 16, "mamba_ngroups": 2},
}  # fmt: skip


NOT_CARRIED = {f"{array} not carried over a chunk boundary" for array in ("conv", "state")}


@cache
def report_of(family: str) -> Report:
    return run_parity(FAMILIES[family], seed=3, mutations=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_transformers_and_every_changed_fact_is_seen(family):
    report = report_of(family)
    assert report.entropy_fraction is None or report.entropy_fraction < 0.5
    errors = {m.mode: m.error for m in report.modes}
    assert all(m.passed for m in report.modes), errors
    # not just outside the tolerance: far outside, so that it cannot pass by chance
    assert {m.mode: m.error for m in report.mutations if not m.error > 20 * m.tolerance} == {}
    assert report.passed


def changes_tried(family: str) -> set[str]:
    return {m.mode for m in report_of(family).mutations}


def test_a_state_that_is_forgotten_between_chunks_is_seen():
    for family in ("mamba", "mamba2", "jamba", "falcon_h1", "zamba2"):
        assert changes_tried(family) >= NOT_CARRIED, family


def test_each_mechanism_has_its_own_mutation():
    assert {f"model.layers.0.mamba.{name} set to one" for name in ("A_log", "D", "norm.weight")} <= changes_tried(
        "mamba2"
    )
    assert {"GatedNorm.eps doubled", "GatedNorm.groups changed", "GatedNorm.before_gate flipped"} <= changes_tried(
        "mamba2"
    )
    assert "model.layers.0.mamba.conv1d.bias zeroed" in changes_tried("mamba")
    assert {f"model.layers.0.mamba.{n}_layernorm.weight set to one" for n in "bc"} <= changes_tried("jamba")
    factors = {"Branch.scale + 10 %", "Branch.in_scale + 10 %", "Embedding.scale + 10 %", "Head.scale + 10 %"}
    rows = {f"Mamba2.{name}_scale + 10 %" for name in ("gate", "x", "b", "c", "dt")}
    assert factors | rows | {"MLP.gate_scale + 10 %"} <= changes_tried("falcon_h1")
    assert {"Mamba2.dt_min + 10 %", "Router.scale + 10 %"} <= changes_tried("nemotron_h")
    assert "SharedBlock.attention_adapters left out" in changes_tried("zamba2")


def test_jambas_pattern_is_that_of_its_config():
    """One layer of attention in eight, at offset 4; experts in every other layer."""
    layers = shrink(FAMILIES["jamba"] | {"num_hidden_layers": 32, "attn_layer_period": 8, "attn_layer_offset": 4})
    assert layers.kept_layers == tuple(range(8))


def test_shared_blocks_are_kept_up_to_the_first_reuse():
    kept = shrink(
        FAMILIES["zamba2"] | {"num_hidden_layers": 16, "layers_block_type": ["mamba", "mamba", "mamba", "hybrid"] * 4}
    )
    assert kept.config["layers_block_type"].count("hybrid") == 3
    assert len(kept.kept_layers) < 12


NATIVE = {
    "kvlab_hybrid": {**BASE, "model_type": "kvlab_hybrid", "num_hidden_layers": 5, "sliding_window": 512,
                     "layer_types": ["mamba2", "full_attention", "gated_delta", "sliding_attention", "linear_attention"],
                     "linear_conv_kernel_dim": 4, "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 64,
                     "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
                     "linear_value_head_dim": 64},
    "kvlab_hymba": {**BASE, "model_type": "kvlab_hymba", "num_hidden_layers": 8, "num_meta_tokens": 128},
}  # fmt: skip


@pytest.mark.parametrize("family", NATIVE)
def test_native_families_are_held_against_the_plain_forward_and_say_so(family):
    report = run_parity(NATIVE[family], seed=3, mutations=True)
    assert report.passed, report.to_json()
    assert report.notes == (NOTE,)
    # scores are sharp enough for a wrong one to show
    assert report.entropy_fraction < 0.5
    assert {m.mode for m in report.mutations} >= NOT_CARRIED
