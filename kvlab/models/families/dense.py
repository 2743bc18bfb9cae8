"""Llama and those that differ from it by a few facts: windows, biases, norms of queries and keys, unrotated layers.

The defaults are those of transformers' configuration classes, because a config.json leaves out fields that have
their default value. Source: transformers 5.24.0, models/<family>/configuration_<family>.py and modeling_<family>.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvlab.models.facts import ModelConfig
from kvlab.models.families.common import Family, attention, gated_mlp, model, pre_norm_layer, rms
from kvlab.models.families.reader import ConfigReader

Windows = Callable[[ConfigReader], tuple[int, ...]]


def no_windows(c: ConfigReader) -> tuple[int, ...]:
    """0 for every layer: each query sees all earlier tokens."""
    return (0,) * c.num_layers


def same_window(c: ConfigReader) -> tuple[int, ...]:
    """`sliding_window` for every layer, 0 where the config says null (Mistral)."""
    return (c.get("sliding_window") or 0,) * c.num_layers


def late_windows(c: ConfigReader) -> tuple[int, ...]:
    """`sliding_window` where `layer_types` says so, else from layer `max_window_layers` on (Qwen).

    Without `use_sliding_window` the window counts for nothing, whatever `layer_types` says.
    """
    window = (c.get("sliding_window") or 0) if c.get("use_sliding_window") else 0
    types = c.get("layer_types")
    if types is None:
        first = c.num_layers if c.get("max_window_layers") is None else c.get("max_window_layers")
        return tuple(window if i >= first else 0 for i in range(c.num_layers))
    return by_layer_type(c, window)


def by_layer_type(c: ConfigReader, window: int) -> tuple[int, ...]:
    """`window` on the layers that `layer_types` calls sliding, 0 elsewhere."""
    types = c.get("layer_types")
    return c.per_layer("layer_types", tuple(window if kind == "sliding_attention" else 0 for kind in types))


def unrotated_windows(c: ConfigReader) -> tuple[int, ...]:
    """`sliding_window` on the layers without rotary positions (SmolLM3), 0 elsewhere."""
    window = (c.get("sliding_window") or 0) if c.get("use_sliding_window") else 0
    if c.get("layer_types"):
        return by_layer_type(c, window)
    return tuple(0 if rotated else window for rotated in rotated_layers(c))


def rotated_layers(c: ConfigReader) -> tuple[bool, ...]:
    """Which layers rotate queries and keys: all, but for the layers a config lists or counts out."""
    if (listed := c.get("no_rope_layers")) is not None:
        return c.per_layer("no_rope_layers", tuple(bool(x) for x in listed))
    if interval := c.get("no_rope_layer_interval"):
        return tuple((i + 1) % interval != 0 for i in range(c.num_layers))
    return (True,) * c.num_layers


def llama_like(
    windows: Windows = no_windows,
    *,
    qkv_bias: bool | str = False,
    out_bias: bool | str = False,
    mlp_bias: bool | str = False,
    qk_norm: bool = False,
) -> Callable[[ConfigReader], ModelConfig]:
    """A builder of pre-norm decoders with rotated grouped-query attention and a gated feed-forward part.

    Args:
        qkv_bias, out_bias, mlp_bias: True, False, or the config field that says.
        qk_norm: an RMS norm over head_dim on every query and key, before rotation.
    """

    def build(c: ConfigReader) -> ModelConfig:
        norm, rope, mlp = rms(c), c.rope(), gated_mlp(c, bias=c.flag(mlp_bias))
        biases = {"qkv_bias": c.flag(qkv_bias), "out_bias": c.flag(out_bias)}
        mixers = [
            attention(c, rope=rope if rotated else None, window=window, qk_norm=norm if qk_norm else None, **biases)
            for window, rotated in zip(windows(c), rotated_layers(c), strict=True)
        ]
        return model(c, [pre_norm_layer(mixer, mlp, norm) for mixer in mixers])

    return build


COMMON: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
_QWEN = COMMON | {
    "max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": Family(
        llama_like(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
        COMMON | {"max_position_embeddings": 2048},
    ),
    "mistral": Family(
        llama_like(same_window),
        COMMON | {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(llama_like(late_windows, qkv_bias=True), _QWEN),
    "qwen3": Family(
        llama_like(late_windows, qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True),
        _QWEN | {"head_dim": 128},
    ),
    "smollm3": Family(
        llama_like(
            unrotated_windows, qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"
        ),
        COMMON
        | {
            "max_position_embeddings": 32_768, "num_key_value_heads": 4, "rope_theta": 2_000_000.0,
            "no_rope_layer_interval": 4, "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip
