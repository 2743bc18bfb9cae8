"""DeepSeek sparse attention in pages against its plain form: index keys scored, a few latents read."""

import math

import pytest
import torch
from recomputed import TEXT, assert_paged_is_recomputed

from kvlab.lab.parity import compare
from kvlab.models.facts import ModelConfig
from kvlab.models.load import empty_model, from_state_dict

KINDS = {
    "an indexer in each layer": {"model_type": "deepseek_v32"},
    "choices shared": {"model_type": "glm_moe_dsa", "indexer_types": ["full", "shared", "full", "shared"]},
}


def tiny(kind: str, **changes):
    config = {
        "hidden_size": 36,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "kv_lora_rank": 17,
        "q_lora_rank": 13,
        "qk_nope_head_dim": 7,
        "qk_rope_head_dim": 6,
        "v_head_dim": 5,
        "index_n_heads": 8,
        "index_head_dim": 9,
        "index_topk": 4,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 9,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "vocab_size": 101,
        "max_position_embeddings": 96,
        "rope_theta": 100.0,
    } | KINDS[kind] | changes  # fmt: skip
    rng = torch.Generator().manual_seed(7)
    state = {}
    for name, place in empty_model(config, "fp64", "cpu", kind).decoder.weights.named.items():
        noise = torch.randn(place.shape, generator=rng, dtype=torch.float64)
        state[name] = 1 + 0.3 * noise if "norm" in name else noise * (1.5 / math.sqrt(place.shape[-1]))
    return from_state_dict(config, state, "fp64"), state


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_paged_logits_are_those_of_the_whole_sequence_recomputed(kind, backend, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", backend)
    assert_paged_is_recomputed(*tiny(kind))


def test_choosing_everything_is_plain_latent_attention():
    few, state = tiny("an indexer in each layer")
    every, _ = tiny("an indexer in each layer", index_topk=len(TEXT))
    plain = {name: tensor for name, tensor in state.items() if ".indexer." not in name}
    v3 = from_state_dict(every.hf_config | {"model_type": "deepseek_v3"}, plain, "fp64")
    run = compare.whole_prefill
    got, wanted = run(every, [TEXT])[0], run(v3, [TEXT])[0]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    assert float((run(few, [TEXT])[0] - wanted).abs().max()) > 0.01


def test_a_layer_that_shares_a_choice_keeps_no_index_keys():
    model, _ = tiny("choices shared")
    assert [[part.kind for part in layer.parts] for layer in model.spec.layers] == [["mla", "index"], ["mla"]] * 2


def test_the_first_layer_needs_an_indexer():
    config = tiny("choices shared")[0].hf_config
    with pytest.raises(ValueError, match="indexer_types: the first layer must be full"):
        ModelConfig.from_hf(config | {"indexer_types": ["shared", "full", "full", "full"]})
