"""Mamba and its hybrids in pages against the same models without a cache (weights of our own, no transformers)."""

import pytest
import torch
from recomputed import TEXT, assert_paged_is_recomputed, tiny

from kvlab.lab.parity import compare
from kvlab.lab.parity.paging import PagedSequences
from kvlab.models.facts import ModelConfig
from kvlab.models.modules.mamba2 import GatedNormFacts, Mamba2Facts
from kvlab.models.reference import reference_forward

BASE = {
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 96,
    "tie_word_embeddings": False,
}
# 9 heads of 8 make up the inner width of 72
HEADS = {"mamba_n_heads": 9, "mamba_d_head": 8, "mamba_n_groups": 3, "mamba_d_state": 7}
CONFIGS = {
    "mamba": {**BASE, "model_type": "mamba", "num_hidden_layers": 2, "state_size": 7, "intermediate_size": 72},
    "falcon_mamba": {**BASE, "model_type": "falcon_mamba", "num_hidden_layers": 2, "state_size": 5, "use_bias": True},
    "mamba2": {**BASE, "model_type": "mamba2", "num_hidden_layers": 2, "num_heads": 9, "head_dim": 8, "n_groups": 3,
               "state_size": 7, "conv_kernel": 2},
    "jamba": {**BASE, "model_type": "jamba", "num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2,
              "num_experts": 5, "mamba_d_state": 7, "mamba_dt_rank": 3},
    "bamba": {**BASE, **HEADS, "model_type": "bamba", "num_hidden_layers": 3, "attn_layer_indices": [1],
              "num_attention_heads": 3, "num_key_value_heads": 1},
    "granitemoehybrid": {**BASE, **HEADS, "model_type": "granitemoehybrid", "num_hidden_layers": 2,
                         "layer_types": ["mamba", "attention"], "num_local_experts": 5, "shared_intermediate_size": 11,
                         "attention_multiplier": 0.3, "residual_multiplier": 0.7},
    "falcon_h1": {**BASE, **HEADS, "model_type": "falcon_h1", "num_hidden_layers": 2, "head_dim": 10,
                  "mamba_d_ssm": 72, "ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 0.9], "ssm_in_multiplier": 0.8,
                  "mlp_multipliers": [0.8, 1.2], "attention_in_multiplier": 1.2},
    "falcon_h1, normed before the gate": {**BASE, **HEADS, "model_type": "falcon_h1", "num_hidden_layers": 1,
                                          "head_dim": 10, "mamba_d_ssm": 72, "mamba_rms_norm": True},
    "nemotron_h": {**BASE, "model_type": "nemotron_h", "num_hidden_layers": 4, "hybrid_override_pattern": "M*E-",
                   "head_dim": 10, "mamba_num_heads": 4, "mamba_head_dim": 5, "n_groups": 2, "ssm_state_size": 7,
                   "n_routed_experts": 6, "moe_latent_size": 9, "moe_intermediate_size": 8,
                   "moe_shared_expert_intermediate_size": 13},
    "zamba2": {**BASE, "model_type": "zamba2", "num_hidden_layers": 4, "num_key_value_heads": 4, "num_mem_blocks": 2,
               "layers_block_type": ["mamba", "hybrid", "hybrid", "hybrid"], "use_mem_rope": True, "adapter_rank": 3,
               "use_shared_attention_adapter": True, "n_mamba_heads": 9, "mamba_ngroups": 3, "mamba_d_state": 7},
}  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
def test_paged_logits_are_those_of_the_whole_sequence_recomputed(family, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "torch")
    assert_paged_is_recomputed(*tiny(CONFIGS[family]))


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_the_plain_operations_give_the_same(family, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "reference")
    assert_paged_is_recomputed(*tiny(CONFIGS[family]))


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_h1", "zamba2"])
@pytest.mark.parametrize("array", ["conv", "state"])
def test_what_is_not_carried_over_a_chunk_boundary_is_missed(family, array):
    model, state = tiny(CONFIGS[family])
    expected = reference_forward(model.config, state, torch.tensor(TEXT))
    first = compare.CHUNKS[0]
    got = compare.chunked_prefill(model, [TEXT], array)[0]
    torch.testing.assert_close(got[:first], expected[:first], rtol=0, atol=1e-10)
    assert (got[first:] - expected[first:]).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_a_recycled_state_page_is_as_good_as_a_fresh_one(family):
    """The page still holds another text's state when the sequence begins anew, with one token or with several."""
    model, state = tiny(CONFIGS[family])
    expected = reference_forward(model.config, state, torch.tensor(TEXT[:10]))
    for pieces in ((TEXT[:1], TEXT[1:10]), (TEXT[:9], TEXT[9:10])):
        cache = PagedSequences(model, 1, len(TEXT))
        cache.step({0: TEXT[::-1]})
        cache.reset(0)
        got = torch.cat([cache.step({0: piece})[0] for piece in pieces])
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def test_uses_of_a_shared_block_share_weights_and_nothing_that_is_cached():
    model, _ = tiny(CONFIGS["zamba2"])
    blocks = [layer.facts.block for layer in model.decoder.layers[1:]]
    assert blocks == [0, 1, 0]
    assert len(model.decoder.stem.blocks) == 2
    kinds = [[part.kind for part in layer.parts] for layer in model.spec.layers]
    assert kinds == [["recurrent"], *[["full", "recurrent"]] * 3]


def test_sizes_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="9 Mamba heads of 7: must make up the inner width of 72"):
        tiny(CONFIGS["bamba"] | {"mamba_d_head": 7})


@pytest.mark.parametrize("family", ["mamba2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2"])
def test_groups_that_do_not_divide_the_heads_are_refused(family):
    """No norm runs over other stretches than the config asks for."""
    name = {"mamba2": "n_groups", "nemotron_h": "n_groups", "zamba2": "mamba_ngroups"}.get(family, "mamba_n_groups")
    with pytest.raises(ValueError, match=r"n_groups 5: must divide the [49] heads of Mamba-2"):
        ModelConfig.from_hf(CONFIGS[family] | {name: 5})


def test_a_norm_over_groups_that_do_not_divide_the_width_is_refused():
    with pytest.raises(ValueError, match="groups 5 of the norm: must divide the inner width of 72"):
        Mamba2Facts(9, 8, 3, 7, 4, norm=GatedNormFacts(groups=5))
