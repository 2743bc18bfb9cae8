"""Parity of the decoders before Llama, every fact changed once."""

import pytest
from parity_check import Reports, assert_parity

GPT = {"n_embd": 1024, "n_layer": 12, "n_head": 16, "n_positions": 1024, "vocab_size": 32_000}
NEOX = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 16,
    "vocab_size": 32_000, "max_position_embeddings": 2048,
}  # fmt: skip
FALCON = {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "vocab_size": 32_000}
FAMILIES = {
    "gpt2, scores scaled by depth": GPT | {"model_type": "gpt2", "n_layer": 2, "scale_attn_by_inverse_layer_idx": True},
    "gptj": GPT | {"model_type": "gptj", "rotary_dim": 32},
    "gpt_neox, side by side": NEOX | {"model_type": "gpt_neox", "rotary_pct": 0.25},
    "gpt_neox, one after the other": NEOX
    | {"model_type": "gpt_neox", "use_parallel_residual": False, "rotary_pct": 0.5, "rotary_emb_base": 1000},
    "falcon, one KV head": FALCON | {"model_type": "falcon", "num_attention_heads": 21, "hidden_size": 21 * 32},
    "falcon, grouped, two norms": FALCON
    | {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 4},
    "falcon, ALiBi, biases, one after the other": FALCON
    | {"model_type": "falcon", "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    "bloom": {"model_type": "bloom", "hidden_size": 1024, "n_layer": 12, "n_head": 16, "vocab_size": 32_000},
    "mpt, twelve heads": {
        "model_type": "mpt", "d_model": 768, "n_layers": 12, "n_heads": 12, "max_seq_len": 2048, "vocab_size": 32_000,
        "attn_config": {"alibi": True, "alibi_bias_max": 8},
    },
}  # fmt: skip
REPORTS = Reports(FAMILIES, {})


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_transformers_and_every_changed_fact_is_seen(family):
    assert_parity(REPORTS(family))


def test_each_mechanism_has_its_own_mutation():
    alibi = {"Attention.alibi left out", "Alibi.max_bias + 10 %", "Alibi.factor + 10 %"}
    assert alibi <= REPORTS.changes("falcon, ALiBi, biases, one after the other")
    assert alibi | {"model.embed_norm.bias zeroed"} <= REPORTS.changes("bloom")
    assert "positions moved by one" in REPORTS.changes("gpt2, scores scaled by depth")
    assert "Rope.interleaved flipped" in REPORTS.changes("gptj")


def test_where_transformers_differs_from_itself_is_said():
    (note,) = REPORTS("falcon, ALiBi, biases, one after the other").notes
    assert note.startswith("falcon with ALiBi: transformers' eager attention adds ALiBi to the mask and to the scores")
    assert REPORTS("bloom").notes == ()
