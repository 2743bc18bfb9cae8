"""Gated delta nets between layers of gated attention, in pages and without (weights of our own, no transformers)."""

import pytest
import torch
from recomputed import TEXT, assert_paged_is_recomputed, tiny

from kvlab.lab.parity import compare
from kvlab.lab.parity.paging import PagedSequences
from kvlab.models.reference import reference_forward

CONFIG = {
    "model_type": "qwen3_next",
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 9,
    "shared_expert_intermediate_size": 11,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "decoder_sparse_step": 2,
    "vocab_size": 101,
    "max_position_embeddings": 96,
    "rope_theta": 100.0,
}


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_paged_logits_are_those_of_the_whole_sequence_recomputed(backend, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", backend)
    assert_paged_is_recomputed(*tiny(CONFIG))


@pytest.mark.parametrize("array", ["conv", "state"])
def test_what_is_not_carried_over_a_chunk_boundary_is_missed(array):
    model, state = tiny(CONFIG)
    expected = reference_forward(model.config, state, torch.tensor(TEXT))
    first = compare.CHUNKS[0]
    got = compare.chunked_prefill(model, [TEXT], array)[0]
    torch.testing.assert_close(got[:first], expected[:first], rtol=0, atol=1e-10)
    assert (got[first:] - expected[first:]).abs().max() > 1e-2


def test_a_recycled_state_page_is_as_good_as_a_fresh_one():
    """The page still holds another text's state when the sequence begins anew (vllm#35219)."""
    model, state = tiny(CONFIG)
    cache = PagedSequences(model, 1, len(TEXT))
    cache.step({0: TEXT[::-1]})
    cache.reset(0)
    # its first step is one token: a decode that is also a start
    pieces = [cache.step({0: piece})[0] for piece in (TEXT[:1], TEXT[1:9], TEXT[9:10])]
    expected = reference_forward(model.config, state, torch.tensor(TEXT[:10]))
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=0, atol=1e-10)


def test_states_keep_three_columns_and_a_matrix_per_value_head_whatever_the_length():
    model, _ = tiny(CONFIG, "fp32")
    arrays = [p.arrays for layer in model.spec.layers for p in layer.parts if p.kind == "recurrent"]
    assert [[a.elements for a in layer] for layer in arrays] == [[3 * (2 * 2 * 7 + 6 * 5), 6 * 7 * 5]] * 2
    assert model.spec.state_bytes == 2 * 4 * (3 * 58 + 210)
