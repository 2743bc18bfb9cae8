"""The native hybrid: attention and states in any ratio, in pages against the same model without a cache."""

import pytest
from recomputed import assert_paged_is_recomputed, tiny

from kvlab.models.facts import ModelConfig

CONFIG = {
    "model_type": "kvlab_hybrid",
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "vocab_size": 101,
    "max_position_embeddings": 96,
    "sliding_window": 5,
    "mamba_n_heads": 9,
    "mamba_d_head": 8,
    "mamba_n_groups": 3,
    "mamba_d_state": 7,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
}
SHAPES = {
    "1:3": {"attention_layers": 1, "recurrent_layers": 3},
    "2:1, windows, gated delta": {"attention_layers": 2, "recurrent_layers": 1, "recurrent_kind": "gated_delta",
                                  "attention_kind": "sliding_attention"},
    "recurrent alone": {"attention_layers": 0, "recurrent_layers": 1, "num_hidden_layers": 2},
    "one of each": {"layer_types": ["mamba2", "full_attention", "linear_attention", "sliding_attention", "gated_delta"],
                    "num_hidden_layers": 5},
    "windows and a few full layers": {"layer_types": ["full_attention", *["sliding_attention"] * 4, "full_attention"],
                                      "num_hidden_layers": 6},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_paged_logits_are_those_of_the_whole_sequence_recomputed(shape, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "torch")
    assert_paged_is_recomputed(*tiny(CONFIG | SHAPES[shape]))


@pytest.mark.parametrize(
    ("attention", "recurrent", "letters"),
    [(1, 3, "RRRARRRA"), (1, 1, "RARARARA"), (1, 7, "R" * 7 + "A"), (3, 1, "RAAARAAA")],
)
def test_a_ratio_is_a_period_with_attention_last(attention, recurrent, letters):
    """Decoder and cache read it alike."""
    config = CONFIG | {"attention_layers": attention, "recurrent_layers": recurrent, "num_hidden_layers": 8}
    model, _ = tiny(config)
    kinds = "".join("A" if layer.parts[0].kind == "full" else "R" for layer in model.spec.layers)
    facts = "".join("A" if "Attention" in type(x.branches[0].module).__name__ else "R" for x in model.config.layers)
    assert kinds == facts == letters


def test_a_kind_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="layer_types 'rnn': must be one of full_attention, sliding_attention, mamba2"):
        ModelConfig.from_hf(CONFIG | {"layer_types": ["rnn"] * 4})
    with pytest.raises(ValueError, match="attention_layers 0, recurrent_layers 0: must be a ratio of layers"):
        ModelConfig.from_hf(CONFIG | {"attention_layers": 0, "recurrent_layers": 0})
