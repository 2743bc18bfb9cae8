"""Llama and those that differ from it by a few facts: windows, biases, norms of queries and keys, unrotated layers.

The defaults are those of transformers' configuration classes, because a config.json leaves out fields that have
their default value. Source: transformers 5.24.0, models/<family>/configuration_<family>.py and modeling_<family>.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvlab.models.facts import EmbeddingFacts, HeadFacts, ModelConfig, NormFacts, TemperatureFacts
from kvlab.models.families.common import (
    Family,
    attention,
    gated_mlp,
    layer_norm,
    model,
    parallel_layer,
    post_norm_layer,
    pre_norm_layer,
    rms,
    sandwich_layer,
)
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
    if listed := c.get("no_rope_layers"):
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


def _olmo2(c: ConfigReader) -> ModelConfig:
    rope, norm, mlp = c.rope(), rms(c), gated_mlp(c)
    biased = c.flag("attention_bias")
    mixer = attention(c, rope=rope, qk_norm=norm, qk_norm_wide=True, qkv_bias=biased, out_bias=biased)
    return model(c, [post_norm_layer(mixer, mlp, norm)] * c.num_layers)


def _starcoder2(c: ConfigReader) -> ModelConfig:
    biased, norm = c.flag("use_bias"), layer_norm(c, "norm_epsilon")
    mlp = gated_mlp(c, gated=False, bias=biased)
    window = c.get("sliding_window") or 0
    mixer = attention(c, rope=c.rope(), window=window, qkv_bias=biased, out_bias=biased)
    return model(c, [pre_norm_layer(mixer, mlp, norm)] * c.num_layers, head=_tied_head(c, norm))


def _tied_head(c: ConfigReader, norm: NormFacts, **facts: Any) -> HeadFacts:
    return HeadFacts(norm, tied=bool(c.get("tie_word_embeddings")), **facts)


def _glm(sandwich: bool) -> Callable[[ConfigReader], ModelConfig]:
    """Interleaved partial rotary positions; the fourth generation has norms before and after each part."""

    def build(c: ConfigReader) -> ModelConfig:
        norm, mlp = rms(c), gated_mlp(c)
        mixer = attention(c, rope=c.rope(interleaved=True), qkv_bias=c.flag("attention_bias"))
        layer = sandwich_layer(mixer, mlp, norm, _GLM4_NORMS) if sandwich else pre_norm_layer(mixer, mlp, norm)
        return model(c, [layer] * c.num_layers)

    return build


def _stablelm(c: ConfigReader) -> ModelConfig:
    c.refuse("qk_layernorm")
    norm, mlp = layer_norm(c, "layer_norm_eps"), gated_mlp(c)
    mixer = attention(c, rope=c.rope(), qkv_bias=c.flag("use_qkv_bias"))
    layer = (parallel_layer if c.get("use_parallel_residual") else pre_norm_layer)(mixer, mlp, norm)
    return model(c, [layer] * c.num_layers, head=_tied_head(c, norm))


def _phi(c: ConfigReader) -> ModelConfig:
    c.refuse("qk_layernorm")
    norm, mlp = layer_norm(c, "layer_norm_eps"), gated_mlp(c, gated=False, bias=True)
    mixer = attention(c, rope=c.rope(), qkv_bias=True, out_bias=True)
    return model(c, [parallel_layer(mixer, mlp, norm)] * c.num_layers, head=_tied_head(c, norm, bias=True))


def _granite(c: ConfigReader) -> ModelConfig:
    norm, mlp, biased = rms(c), gated_mlp(c, bias=c.flag("mlp_bias")), c.flag("attention_bias")
    scale = float(c.get("attention_multiplier", 1.0))
    mixer = attention(c, rope=c.rope(), scale=scale, qkv_bias=biased, out_bias=biased)
    layer = pre_norm_layer(mixer, mlp, norm, scale=float(c.get("residual_multiplier", 1.0)))
    head = _tied_head(c, norm, scale=1 / float(c.get("logits_scaling", 1.0)))
    embedding = EmbeddingFacts(scale=float(c.get("embedding_multiplier", 1.0)))
    return model(c, [layer] * c.num_layers, head=head, embedding=embedding)


def _gemma(c: ConfigReader) -> ModelConfig:
    norm = rms(c, offset=1.0)
    # an old spelling of the released configs means the tanh form
    act = "gelu_pytorch_tanh" if c.activation() == "gelu" else c.activation()
    biased = c.flag("attention_bias")
    mixer = attention(c, rope=c.rope(), qkv_bias=biased, out_bias=biased)
    layer = pre_norm_layer(mixer, gated_mlp(c, activation=act), norm)
    embedding = EmbeddingFacts(scale=c.hidden_size**0.5)
    return model(c, [layer] * c.num_layers, head=_tied_head(c, norm), embedding=embedding)


def _ministral3(c: ConfigReader) -> ModelConfig:
    rule, rope, norm, mlp = c.get("rope_parameters") or {}, c.rope(), rms(c), gated_mlp(c)
    weight = rule.get("llama_4_scaling_beta")
    grown = TemperatureFacts(c.original_max_position(rule), float(weight)) if weight else None
    mixers = [attention(c, rope=rope, window=window, temperature=grown) for window in same_window(c)]
    return model(c, [pre_norm_layer(mixer, mlp, norm) for mixer in mixers])


_GLM4_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_LAYER = r"(model\.layers\.\d+\.)"

COMMON: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
_QWEN = COMMON | {
    "max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip

_GLM = COMMON | {
    "max_position_embeddings": 131_072, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7,
    "attention_bias": True, "partial_rotary_factor": 0.5,
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
    "phi3": Family(
        llama_like(same_window),
        COMMON | {
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096,
        },
    ),
    "olmo2": Family(_olmo2, COMMON | {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}),
    "starcoder2": Family(
        _starcoder2,
        COMMON | {
            "max_position_embeddings": 4096, "num_key_value_heads": 2, "norm_epsilon": 1e-5, "use_bias": True,
            "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        },
        names=[
            (_LAYER + r"mlp\.c_fc\.(weight|bias)", [(r"\1mlp.up_proj.\2", None)]),
            (_LAYER + r"mlp\.c_proj\.(weight|bias)", [(r"\1mlp.down_proj.\2", None)]),
        ],
    ),
    "glm": Family(_glm(sandwich=False), _GLM),
    "glm4": Family(_glm(sandwich=True), _GLM),
    "stablelm": Family(
        _stablelm,
        COMMON | {
            "max_position_embeddings": 4096, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25,
            "num_key_value_heads": 32,
        },
    ),
    "phi": Family(
        _phi,
        COMMON | {
            "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
            "hidden_act": "gelu_new",
        },
        names=[
            (_LAYER + r"self_attn\.dense\.(weight|bias)", [(r"\1self_attn.o_proj.\2", None)]),
            (_LAYER + r"mlp\.fc1\.(weight|bias)", [(r"\1mlp.up_proj.\2", None)]),
            (_LAYER + r"mlp\.fc2\.(weight|bias)", [(r"\1mlp.down_proj.\2", None)]),
            (r"model\.final_layernorm\.(weight|bias)", [(r"model.norm.\1", None)]),
        ],
    ),
    "ministral3": Family(
        _ministral3,
        COMMON | {
            "max_position_embeddings": 262_144, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
        },
    ),
    "granite": Family(_granite, COMMON | {"max_position_embeddings": 2048}),
    "gemma": Family(
        _gemma,
        COMMON | {
            "max_position_embeddings": 8192, "num_key_value_heads": 16, "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip
