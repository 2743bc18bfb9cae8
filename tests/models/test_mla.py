"""Latent attention in pages against every head written out, without a cache (weights of our own, no transformers)."""

import math

import pytest
import torch
from recomputed import assert_paged_is_recomputed

from kvlab.models.facts import ModelConfig
from kvlab.models.load import empty_model, from_state_dict

YARN = {"rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 12, "mscale_all_dim": 0.7}}
KINDS = {
    "queries from the stream": {"model_type": "deepseek_v2", "q_lora_rank": None},
    "queries from a latent, biases": {"model_type": "deepseek_v3", "attention_bias": True},
    "stretched positions, halves paired": {"model_type": "deepseek_v3", "rope_interleave": False} | YARN,
    "scaled branches": {"model_type": "minicpm3", "dim_model_base": 11, "scale_emb": 3},
}


def tiny(kind: str, dtype: str = "fp64"):
    config = {
        "hidden_size": 36,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "kv_lora_rank": 17,
        "q_lora_rank": 13,
        "qk_nope_head_dim": 7,
        "qk_rope_head_dim": 6,
        "v_head_dim": 5,
        "first_k_dense_replace": 2,
        "moe_intermediate_size": 9,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "vocab_size": 101,
        "max_position_embeddings": 96,
        "rope_theta": 100.0,
    } | KINDS[kind]
    rng = torch.Generator().manual_seed(7)
    state = {}
    for name, place in empty_model(config, "fp64", "cpu", kind).decoder.weights.named.items():
        noise = torch.randn(place.shape, generator=rng, dtype=torch.float64)
        state[name] = 1 + 0.3 * noise if "norm" in name else noise * (1.5 / math.sqrt(place.shape[-1]))
    return from_state_dict(config, state, dtype), state


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_paged_logits_are_those_of_the_whole_sequence_recomputed(kind, backend, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", backend)
    assert_paged_is_recomputed(*tiny(kind))


def test_a_layer_keeps_latents_and_rotary_keys_and_nothing_per_head():
    model, _ = tiny("queries from a latent, biases")
    assert [[(p.latent_dim, p.rope_dim) for p in layer.parts] for layer in model.spec.layers] == [[(17, 6)]] * 3
    per_token = sum(part.entry_bytes for layer in model.spec.layers for part in layer.parts)
    assert per_token == 3 * (17 + 6) * 8


def test_scores_grow_with_the_stretch():
    """0.1 * 0.7 * ln 8 + 1 for queries, and the same for keys."""
    scales = [
        ModelConfig.from_hf(tiny(kind)[0].hf_config).layers[0].branches[0].module.scale
        for kind in ("queries from a latent, biases", "stretched positions, halves paired")
    ]
    assert scales[0] == 13**-0.5
    assert scales[1] == pytest.approx(13**-0.5 * (0.07 * math.log(8) + 1) ** 2, rel=1e-12)


def test_without_latents_there_is_one_clear_error():
    config = tiny("queries from the stream")[0].hf_config
    with pytest.raises(ValueError, match="kv_lora_rank, use_mla: a config of this family must have latent attention"):
        ModelConfig.from_hf(config | {"use_mla": False})
