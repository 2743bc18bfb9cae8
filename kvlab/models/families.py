"""Model families as rows of facts: what differs from one `model_type` to the next, and nothing else.

A fact is a value, or the name of the config field that holds it. The defaults are those of transformers'
configuration classes, because a config.json leaves out fields that have their default value.

Source: transformers 5.24.0, models/<family>/configuration_<family>.py and modeling_<family>.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Windows = Callable[[dict[str, Any], int], tuple[int, ...]]


def no_windows(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """0 for every layer: each query sees all earlier tokens."""
    return (0,) * num_layers


def same_window(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """`sliding_window` for every layer, 0 where the config says null (Mistral)."""
    return (config.get("sliding_window") or 0,) * num_layers


def late_windows(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """`sliding_window` where `layer_types` says so, else from layer `max_window_layers` on (Qwen).

    Without `use_sliding_window` the window counts for nothing, whatever `layer_types` says.
    """
    window = (config.get("sliding_window") or 0) if config.get("use_sliding_window") else 0
    types = config.get("layer_types")
    if types is None:
        first = num_layers if config.get("max_window_layers") is None else config["max_window_layers"]
        return tuple(window if i >= first else 0 for i in range(num_layers))
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def unrotated_windows(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """`sliding_window` on the layers without rotary positions (SmolLM3), 0 elsewhere."""
    window = (config.get("sliding_window") or 0) if config.get("use_sliding_window") else 0
    if types := config.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else 0 for kind in types)
    return tuple(0 if rotated else window for rotated in rotated_layers(config, num_layers))


def rotated_layers(config: dict[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Which layers rotate queries and keys: all, but for the layers a config lists or counts out."""
    if (listed := config.get("no_rope_layers")) is not None:
        return tuple(bool(x) for x in listed)
    if interval := config.get("no_rope_layer_interval"):
        return tuple((i + 1) % interval != 0 for i in range(num_layers))
    return (True,) * num_layers


@dataclass(frozen=True)
class Family:
    """What sets a family apart.

    Attributes:
        windows: (config, number of layers) -> window of each layer in tokens, 0 for none.
        qkv_bias, out_bias, mlp_bias: True, False, or the config field that says.
        qk_norm: an RMS norm over head_dim on every query and key, before rotation.
        defaults: values of fields that a config.json may leave out.
    """

    windows: Windows = no_windows
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)


_COMMON: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults=_COMMON | {"max_position_embeddings": 2048},
    ),
    "mistral": Family(
        windows=same_window,
        defaults=_COMMON | {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(
        windows=late_windows,
        qkv_bias=True,
        defaults=_COMMON
        | {
            "max_position_embeddings": 32_768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "qwen3": Family(
        windows=late_windows,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm=True,
        defaults=_COMMON
        | {
            "max_position_embeddings": 32_768,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "smollm3": Family(
        windows=unrotated_windows,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults=_COMMON
        | {
            "max_position_embeddings": 32_768,
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
    ),
}


def get_family(model_type: str | None) -> Family:
    """The facts of the family `model_type`.

    Raises:
        ValueError: the engine does not run it; the message names it and lists those it runs.
    """
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r}: the engine runs {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]
