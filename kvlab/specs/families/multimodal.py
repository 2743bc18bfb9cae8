"""Multimodal wrappers: which part of the config is the text decoder, and layers that read an encoder's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlab.specs.families.dense import Parts, full, head_dim, kv_heads
from kvlab.specs.families.fields import Fields
from kvlab.specs.parts import CrossAttention

# wrapper -> the text family that its config class assumes when the text part names none
WRAPPERS = {
    "aya_vision": "cohere2", "deepseek_vl_v2": "deepseek_v2", "gemma3": "gemma3_text", "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text", "glm4v": "glm4v_text", "glm4v_moe": "glm4v_moe_text", "idefics3": "llama",
    "internvl": "qwen2", "internvl_chat": "", "kimi_k25": "kimi_k2", "kimi_vl": "deepseek_v3", "llama4": "llama4_text",
    "llava": "llama", "llava_next": "llama", "llava_next_video": "llama", "llava_onevision": "qwen2",
    "mistral3": "mistral", "mllama": "mllama_text_model", "paligemma": "gemma", "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_audio": "qwen2", "qwen2_vl": "qwen2_vl_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text", "smolvlm": "llama", "voxtral": "llama",
}  # fmt: skip

# published wrappers (llava-hf) leave these to the class of the text part; a bare config must state them
WRAPPED_DEFAULTS = {
    family: {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": longest,
    }
    for family, longest in (("llama", 2048), ("mistral", 131072))
}

_TEXT_KEYS = ("text_config", "llm_config", "language_config")


def text_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The config of the text decoder inside `config`, and its family; `config` itself when it is no wrapper.

    Raises:
        ValueError: a wrapper without a text part.
    """
    model_type = config["model_type"]
    if model_type not in WRAPPERS:
        return config, model_type
    for key in _TEXT_KEYS:
        part = config.get(key)
        if isinstance(part, Mapping):
            return part, part.get("model_type") or WRAPPERS[model_type]
    if "num_hidden_layers" not in config:
        raise ValueError(f"{model_type} config: missing {' or '.join(_TEXT_KEYS)}, the text decoder's part")
    return config, WRAPPERS[model_type]


def cross(f: Fields) -> Parts:
    """Keys and values of the image's tokens, computed once."""
    shape = (kv_heads(f), head_dim(f), head_dim(f))
    return (CrossAttention(*shape, f.formats.kv, encoder_tokens=f.image_tokens),)


def mllama(f: Fields) -> list[Parts]:
    """Self-attention, but cross attention in cross_attention_layers."""
    where = f.listed("cross_attention_layers")
    if where is None:
        raise ValueError(f"{f.model_type} config: missing cross_attention_layers")
    f.note(f"cross attention holds {f.image_tokens} image tokens, whatever the text's length")
    return [cross(f) if i in where else full(f) for i in range(f.num_layers)]
