"""Short convolutions and Kimi delta attention in pages and without a cache (weights of our own, no transformers)."""

import pytest
from recomputed import assert_paged_is_recomputed, tiny

BASE = {
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "vocab_size": 101,
    "max_position_embeddings": 96,
}
LFM2 = BASE | {
    "model_type": "lfm2",
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "conv_bias": True,
    "block_auto_adjust_ff_dim": False,
}
KIMI = BASE | {
    "model_type": "kimi_linear",
    "num_hidden_layers": 3,
    "linear_attn_config": {
        "full_attn_layers": [2],
        "kda_layers": [1, 3],
        "num_heads": 2,
        "head_dim": 9,
        "short_conv_kernel_size": 4,
    },
    "kv_lora_rank": 17,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 6,
    "v_head_dim": 5,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 9,
    "num_shared_experts": 2,
}


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("config", [LFM2, KIMI], ids=["lfm2", "kimi_linear"])
def test_paged_logits_are_those_of_the_whole_sequence_recomputed(config, backend, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", backend)
    assert_paged_is_recomputed(*tiny(config))


def test_a_short_convolution_keeps_two_columns_per_channel():
    model, _ = tiny(LFM2, "fp32")
    assert [part.fixed_bytes for _, part in model.spec.parts()] == [2 * 36 * 4, 0, 2 * 36 * 4]


def test_kimi_delta_attention_keeps_a_square_matrix_per_head():
    model, _ = tiny(KIMI, "fp32")
    assert [part.fixed_bytes for _, part in model.spec.parts()] == [
        4 * (3 * 3 * 18 + 2 * 81),
        0,
        4 * (3 * 3 * 18 + 2 * 81),
    ]
