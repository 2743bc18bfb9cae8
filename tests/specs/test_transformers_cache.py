"""Tiny random models of families that no published config here covers: what transformers really keeps, value by value.

transformers keeps k convolution columns where kvlab keeps k - 1, and W - 1 rows of a full window where kvlab has W.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvlab.specs.families import from_config

torch = pytest.importorskip("torch", reason="runs tiny models")
transformers = pytest.importorskip("transformers", reason="runs tiny models")

BASE = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GPT = {"vocab_size": 97, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "eos_token_id": 2}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "afmoe": {**BASE, **MOE, "sliding_window": 16, "head_dim": 16, "num_dense_layers": 1},
    "bamba": {**BASE, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8},
    "codegen": {**GPT, "rotary_dim": 8},
    "exaone4": {**BASE, "sliding_window": 16, "sliding_window_pattern": 4},
    "glm4_moe_lite": {
        **BASE, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
    "gpt_bigcode": {**GPT, "multi_query": True},
    "lfm2_moe": {**BASE, **MOE, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3},
    "mamba": {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "state_size": 8, "eos_token_id": 2},
    "qwen2_moe": {**BASE, **MOE, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": {
        **BASE, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    },
    "starcoder2": {**BASE, "sliding_window": 16},
}  # fmt: skip


def _cached(model_type: str, config: dict[str, Any], tokens: int) -> tuple[int, int, int]:
    """Values that transformers keeps after `tokens` tokens: keys and values, convolution inputs, states."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[model_type](**config)).eval()
    with torch.no_grad():
        out = model((torch.arange(tokens) % 90 + 3)[None], use_cache=True)
    cache = out.past_key_values if hasattr(out, "past_key_values") else out.cache_params
    found = {"keys": 0, "values": 0, "conv": 0, "recurrent": 0}
    for layer in cache.layers:
        for name, value in vars(layer).items():
            tensors = value.values() if isinstance(value, dict) else [value]
            kind = next((kind for kind in found if name.startswith(kind)), None)
            if kind:
                found[kind] += sum(x.numel() for x in tensors if isinstance(x, torch.Tensor))
    return found["keys"] + found["values"], found["conv"], found["recurrent"]


@pytest.mark.parametrize("model_type", CONFIGS)
def test_same_values_as_transformers(model_type: str) -> None:
    config, tokens = CONFIGS[model_type], 7
    spec = from_config({"model_type": model_type, **config}, kv_format="fp32")
    arrays = [a for _, part in spec.parts() if part.kind == "recurrent" for a in part.arrays]
    conv = sum(a.elements // a.columns * (a.columns + 1) for a in arrays if a.name == "conv")
    state = sum(a.elements for a in arrays if a.name == "state")
    kv = (spec.bytes_at(tokens) - spec.state_bytes) // 4
    assert kv + conv + state > 0
    assert _cached(model_type, config, tokens) == (kv, conv, state)


def test_transformers_keeps_one_row_less_of_a_full_window() -> None:
    config = CONFIGS["starcoder2"]
    spec = from_config({"model_type": "starcoder2", **config}, kv_format="fp32")
    row = spec.bytes_per_token_short // 4
    assert spec.bytes_at(40) // 4 == 16 * row
    assert _cached("starcoder2", config, 40)[0] == 15 * row
