"""The paged decoder against the plain forward without a cache, on weights kvlab made itself (no transformers)."""

import math

import pytest
import torch

from kvlab.lab.parity.paging import PagedSequences
from kvlab.models.load import empty_model, from_state_dict
from kvlab.models.reference import reference_forward, visible

TEXT = [3, 17, 4, 4, 90, 55, 21, 8, 0, 100, 33, 34, 35, 2, 1, 77, 12, 60, 9, 5, 41]
KINDS = {
    "mqa": {"num_key_value_heads": 1},
    "mha, biases": {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True},
    "head_dim 10": {"head_dim": 10, "tie_word_embeddings": True},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "qk norm": {"model_type": "qwen3", "head_dim": 12},
    "window": {"model_type": "mistral", "sliding_window": 5},
    "late window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "unrotated": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1], "tie_word_embeddings": False},
}


def tiny(kind: str, dtype: str = "fp64"):
    config = {
        "model_type": "llama",
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 101,
        "max_position_embeddings": 64,
        "rope_theta": 100.0,
    } | KINDS[kind]
    rng = torch.Generator().manual_seed(7)
    state = {}
    for name, place in empty_model(config, "fp64", "cpu", kind).decoder.weights.named.items():
        noise = torch.randn(place.shape, generator=rng, dtype=torch.float64)
        state[name] = 1 + 0.3 * noise if "norm" in name else noise * (1.5 / math.sqrt(place.shape[-1]))
    return from_state_dict(config, state, dtype), state


@pytest.mark.parametrize("kind", KINDS)
def test_paged_logits_are_those_of_the_whole_sequence_recomputed(kind):
    model, state = tiny(kind)
    expected = reference_forward(model.config, state, torch.tensor(TEXT))
    cache = PagedSequences(model, 2, len(TEXT), block_size=4)
    # a chunk, single tokens, and a second sequence as batch mate
    pieces = [cache.step({0: TEXT[:9], 1: TEXT[:6]})[0]]
    pieces += [cache.step({0: TEXT[i : i + 1], 1: TEXT[i : i + 1]}, padded_rows=2)[0] for i in range(9, len(TEXT))]
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=0, atol=1e-11)


def test_only_the_wanted_rows_get_logits():
    model, _ = tiny("late window")
    work = {0: TEXT[:9], 1: TEXT[3:4], 2: TEXT[:5]}
    every, last = (PagedSequences(model, 3, 9).step(work, 3, last_only=only) for only in (False, True))
    assert list(last) == [1, 0, 2], "decodes come first in a batch"
    for seq in work:
        assert last[seq].shape == (1, 101)
        torch.testing.assert_close(last[seq], every[seq][-1:], rtol=0, atol=1e-12)


def test_fp32_stays_within_rounding_of_fp64():
    wide, _ = tiny("qk norm")
    narrow, _ = tiny("qk norm", "fp32")
    a, b = (PagedSequences(m, 1, len(TEXT)).step({0: TEXT})[0] for m in (wide, narrow))
    assert float((a - b).abs().max() / a.std()) < 1e-4


def test_a_window_sees_itself_and_the_tokens_before_it():
    rows = visible(5, 3).tolist()
    assert rows[1] == [True, True, False, False, False]
    assert rows[4] == [False, False, True, True, True]
    assert visible(5, 0).sum() == 15


def test_checkpoint_names_are_views_of_the_fused_tensors():
    model, state = tiny("mha, biases")
    weights, layer = model.decoder.weights, model.decoder.layers[1]
    assert layer.qkv.weight.shape == (3 * 48, 48) and layer.mlp.gate_up.shape == (2 * 56, 48)
    k = weights.named["model.layers.1.self_attn.k_proj.weight"]
    assert torch.equal(k, state["model.layers.1.self_attn.k_proj.weight"])
    assert k.untyped_storage().data_ptr() == layer.qkv.weight.untyped_storage().data_ptr()
    assert weights.num_bytes == 8 * sum(t.numel() for t in state.values())
