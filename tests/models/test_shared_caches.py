"""Layers that own no pages: neighbours that share (CLA), and Gemma 3n's tail (weights of our own, no transformers)."""

import pytest
import torch
from recomputed import TEXT, assert_paged_is_recomputed, tiny

from kvlab.lab.parity import compare
from kvlab.models.families.shared import sources
from kvlab.specs.layout import group_parts
from kvlab.specs.parts import Shared

BASE = {
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "vocab_size": 101,
    "max_position_embeddings": 96,
}
CLA = BASE | {"model_type": "kvlab_cla", "num_hidden_layers": 5, "rope_theta": 100.0}
GEMMA = BASE | {
    "model_type": "gemma3n_text",
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 5,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.8, 0.8, 0.0, 0.0, 0.0, 0.0],
    "vocab_size_per_layer_input": 90,
    "hidden_size_per_layer_input": 7,
    "laurel_rank": 5,
    "altup_num_inputs": 3,
}


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("config", [CLA, CLA | {"cla_sharing_factor": 3}, GEMMA], ids=["cla2", "cla3", "gemma3n"])
def test_paged_logits_are_those_of_the_whole_sequence_recomputed(config, backend, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", backend)
    assert_paged_is_recomputed(*tiny(config))


def test_every_second_layer_owns_nothing():
    """5 layers in pairs: three own keys and values of 3 heads x 8 values in fp32, two read the layer before them."""
    spec = tiny(CLA, "fp32")[0].spec
    assert [part.source if isinstance(part, Shared) else None for _, part in spec.parts()] == [None, 0, None, 2, None]
    assert spec.bytes_per_token == 3 * 2 * 3 * 8 * 4
    (group,) = group_parts(spec, 16)
    assert group.members == ((0, 0), (2, 0), (4, 0))


def test_the_tail_reads_the_last_owner_of_its_own_kind():
    assert sources([4, 4, 0, 4, 0, 4, 0], shared=3) == (None, None, None, None, 2, 3, 2)
    assert sources([4, 0], shared=0) == (None, None)
    spec = tiny(GEMMA, "fp32")[0].spec
    assert [part.source for _, part in spec.parts() if isinstance(part, Shared)] == [2, 3]


def test_layers_that_share_have_no_projections_of_their_own():
    names = tiny(GEMMA)[1]
    assert "model.layers.3.self_attn.k_proj.weight" in names
    assert not [n for n in names if n.startswith(("model.layers.4.", "model.layers.5.")) and "k_proj" in n]


def test_reading_another_layers_cache_matters():
    """Moved to another owner, the answers change: the shared cache is really read."""
    model, state = tiny(CLA)
    other, _ = tiny(CLA | {"cla_sharing_factor": 3})
    same = {name: state[name] for name in other.decoder.weights.named if name in state}
    other.decoder.weights.fill(same.items())
    got, moved = (compare.whole_prefill(m, [TEXT])[0] for m in (model, other))
    torch.testing.assert_close(got[0], moved[0], rtol=0, atol=1e2)
    assert (got - moved).abs().max() > 1e-2
