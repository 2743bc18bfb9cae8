"""DeepSeek-V4's layers in pages against their plain form: windows, entries, open buffers, chosen entries, streams."""

import math

import pytest
import torch
from recomputed import assert_paged_is_recomputed

from kvlab.models.load import empty_model, from_state_dict

TEXT = [3, 17, 4, 4, 90, 55, 21, 8, 0, 100, 33, 34, 35, 2, 1, 77, 12, 60, 9, 5, 41, 6, 7, 19, 64]
SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
KINDS = {
    "window alone": [SLIDING],
    "heavily compressed": [HCA, HCA],
    "sparse": [CSA, CSA],
    "all three": [SLIDING, CSA, HCA, CSA],
}


def tiny(kind: str, **changes):
    config = {
        "model_type": "deepseek_v4",
        "layer_types": KINDS[kind],
        "num_hidden_layers": len(KINDS[kind]),
        "mlp_layer_types": ["hash_moe", *["moe"] * (len(KINDS[kind]) - 1)],
        "compress_rates": {CSA: 3, HCA: 5},
        "hidden_size": 36,
        "num_attention_heads": 4,
        "head_dim": 10,
        "qk_rope_head_dim": 6,
        "q_lora_rank": 13,
        "o_groups": 2,
        "o_lora_rank": 5,
        "index_n_heads": 8,
        "index_head_dim": 9,
        "index_topk": 3,
        "sliding_window": 4,
        "moe_intermediate_size": 9,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 3,
        "swiglu_limit": 1.5,
        "vocab_size": 101,
        "max_position_embeddings": 96,
        "rope_theta": 100.0,
        "compress_rope_theta": 300.0,
    } | changes
    rng = torch.Generator().manual_seed(7)
    state = {}
    for name, place in empty_model(config, "fp64", "cpu", kind).decoder.weights.named.items():
        noise = torch.randn(place.shape, generator=rng, dtype=torch.float64)
        state[name] = 1 + 0.3 * noise if "norm" in name else noise * (1.5 / math.sqrt(place.shape[-1]))
        if name.endswith("tid2eid"):
            state[name] = torch.rand(len(place), 6, generator=rng).argsort(-1)[:, :2]
    return from_state_dict(config, state, "fp64"), state


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_paged_logits_are_those_of_the_whole_sequence_recomputed(kind, backend, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", backend)
    assert_paged_is_recomputed(*tiny(kind))


def test_parts_of_a_layer():
    model, _ = tiny("all three")
    kinds = [[part.kind for part in layer.parts] for layer in model.spec.layers]
    csa = ["sliding", "compressed", "index", "buffer"]
    assert kinds == [["sliding"], csa, ["sliding", "compressed", "buffer"], csa]
    sparse, heavy = model.spec.layers[1].parts[3], model.spec.layers[2].parts[2]
    # two open tokens of two series and three closed of one, values and gates, for entries and for index keys
    assert sparse.fixed_bytes == 8 * 2 * (2 * 2 * (10 + 9) + 3 * (10 + 9))
    assert heavy.fixed_bytes == 8 * 2 * 4 * 10
