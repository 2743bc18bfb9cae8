"""Models without a softmax over tokens: linear attention and retention (native), MiniMax's layer, RWKV."""

import math

import pytest
import torch
from recomputed import TEXT, assert_paged_is_recomputed, tiny

from kvlab.lab.parity import compare
from kvlab.models.facts import ModelConfig
from kvlab.models.reference import reference_forward

BASE = {
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "vocab_size": 101,
    "max_position_embeddings": 96,
    "rope_theta": 100.0,
}
ONE_IN_THREE = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
MODELS = {
    "linear": {"model_type": "kvlab_linear"},
    "retnet": {"model_type": "kvlab_retnet"},
    "retnet, attention between": ONE_IN_THREE | {"model_type": "kvlab_retnet"},
    "minimax": ONE_IN_THREE
    | {"model_type": "minimax", "num_local_experts": 5, "num_experts_per_tok": 2, "mlp_alpha_factor": 1.7},
    "rwkv": {"model_type": "rwkv", "attention_hidden_size": 22, "context_length": 96},
}


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("name", MODELS)
def test_recurrent_form_in_pages_is_the_parallel_form(name, backend, monkeypatch):
    """The plain forward scores every pair of tokens; the pages hold one matrix per head."""
    monkeypatch.setenv("KVLAB_OPS", backend)
    model, state = tiny(BASE | MODELS[name])
    # sums of positive scores alone divide: no cancellation to speak of, and none in the norms that follow
    assert_paged_is_recomputed(model, state, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_a_state_not_carried_over_a_chunk_boundary_is_missed(name):
    model, state = tiny(BASE | MODELS[name])
    expected = reference_forward(model.config, state, torch.tensor(TEXT))
    got = compare.chunked_prefill(model, [TEXT], "state")[0]
    assert (got - expected)[compare.CHUNKS[0] :].abs().max() > 1e-2


def test_state_bytes_are_one_matrix_per_head_whatever_the_length():
    """10 x 10 values of 3 heads in fp32, and for linear attention a column more: the sum of keys it divides by."""
    fixed = {name: [p.fixed_bytes for _, p in tiny(BASE | MODELS[name], "fp32")[0].spec.parts()] for name in MODELS}
    assert fixed["linear"] == [4 * 3 * 10 * 11] * 3
    assert fixed["retnet"] == [4 * 3 * 10 * 10] * 3
    # RWKV: two inputs of 36 channels, and three values of 22
    assert fixed["rwkv"] == [4 * (2 * 36 + 3 * 22)] * 3
    assert fixed["retnet, attention between"] == [1200, 0, 1200]
    spec = tiny(BASE | MODELS["retnet"], "fp32")[0].spec
    assert spec.bytes_at(1) == spec.bytes_at(50_000) == 3 * 1200


def test_retention_keeps_31_of_32_parts_in_its_first_head_and_more_in_each_further():
    decays = ModelConfig.from_hf(BASE | MODELS["retnet"]).layers[0].branches[0].module.decays.exp()
    assert decays.tolist() == pytest.approx([31 / 32, 63 / 64, 127 / 128], abs=1e-15)


def test_lightning_attention_decays_less_the_deeper_the_layer():
    layers = ModelConfig.from_hf(BASE | MODELS["minimax"]).layers
    first, last = (layers[i].branches[0].module.decays for i in (0, 2))
    assert first.tolist() == pytest.approx([-(2 ** (-8 * (h + 1) / 3)) for h in range(3)], rel=1e-4)
    assert (last > first).all()
    assert math.isclose(float(last[0]), 0.0, abs_tol=1e-4)


def test_a_minimax_without_a_class_of_its_own_is_refused():
    with pytest.raises(ValueError, match="minimax_m1"):
        ModelConfig.from_hf(BASE | MODELS["minimax"] | {"model_type": "minimax_m1"})
