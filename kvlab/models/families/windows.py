"""Windows and chunks between full layers: Gemma 2 and 3, OLMo 3, Cohere 2, gpt-oss, Llama 4.

Defaults are those of transformers' configuration classes. Source: transformers 5.24.0,
models/<family>/configuration_<family>.py and modeling_<family>.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvlab.models.facts import EmbeddingFacts, HeadFacts, ModelConfig, NormFacts, RopeFacts, TemperatureFacts
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
from kvlab.models.families.dense import COMMON, rotated_layers
from kvlab.models.families.moe import experts
from kvlab.models.families.reader import ConfigReader


def windows(c: ConfigReader, period: int) -> tuple[int, ...]:
    """`sliding_window` on the layers that `layer_types` calls sliding, else on all but every `period`-th; 0 elsewhere.

    A period that the config states counts before `period`.
    """
    window, types = c.get("sliding_window") or 0, c.get("layer_types")
    if types is None:
        n = c.get("sliding_window_pattern") or period
        types = ["full_attention" if (i + 1) % n == 0 else "sliding_attention" for i in range(c.num_layers)]
    return c.per_layer("layer_types", tuple(window if kind == "sliding_attention" else 0 for kind in types))


def ropes(c: ConfigReader, local_theta: str, default_theta: float) -> tuple[RopeFacts, RopeFacts]:
    """(rule of the full layers, rule of the windows): stated apart in rope_parameters, else windows are not stretched.

    Args:
        local_theta: field of the windows' base in the old spelling.
    """
    stated = c.get("rope_parameters") or {}
    if "sliding_attention" in stated:
        return c.rope("full_attention"), c.rope("sliding_attention")
    return c.rope(), RopeFacts(theta=float(c.get(local_theta, default_theta)))


def _gemma2(c: ConfigReader) -> ModelConfig:
    rope, cap = c.rope(), float(c.get("attn_logit_softcapping") or 0)
    return _gemma(c, [{"window": w, "rope": rope, "softcap": cap} for w in windows(c, 2)])


def _gemma3(c: ConfigReader) -> ModelConfig:
    c.refuse("use_bidirectional_attention")
    full, local = ropes(c, "rope_local_base_freq", 10_000.0)
    qk_norm = rms(c, offset=1.0)
    return _gemma(c, [{"window": w, "rope": local if w else full, "qk_norm": qk_norm} for w in windows(c, 6)])


def _gemma(c: ConfigReader, layers: list[dict[str, Any]]) -> ModelConfig:
    """Norms before and after each part, their weights stored less one; scores scaled by a field of the config."""
    norm, biased = rms(c, offset=1.0), c.flag("attention_bias")
    mlp = gated_mlp(c, activation=c.activation("hidden_activation"))
    scale = float(c.get("query_pre_attn_scalar")) ** -0.5
    common = {"scale": scale, "qkv_bias": biased, "out_bias": biased}
    cap = float(c.get("final_logit_softcapping") or 0)
    return model(
        c,
        [sandwich_layer(attention(c, **facts, **common), mlp, norm) for facts in layers],
        head=HeadFacts(norm, tied=bool(c.get("tie_word_embeddings")), softcap=cap),
        embedding=EmbeddingFacts(scale=c.hidden_size**0.5),
    )


def _olmo3(c: ConfigReader) -> ModelConfig:
    full, local = ropes(c, "rope_local_base_freq", 500_000.0)
    norm, mlp, biased = rms(c), gated_mlp(c), c.flag("attention_bias")
    common = {"qk_norm": norm, "qk_norm_wide": True, "qkv_bias": biased, "out_bias": biased}
    mixers = [attention(c, rope=local if w else full, window=w, **common) for w in windows(c, 4)]
    return model(c, [post_norm_layer(mixer, mlp, norm) for mixer in mixers])


def _cohere(c: ConfigReader) -> ModelConfig:
    c.refuse("use_qk_norm")
    return _parallel(c, (0,) * c.num_layers, c.rope(interleaved=True), None)


def _cohere2(c: ConfigReader) -> ModelConfig:
    # only windows rotate
    return _parallel(c, windows(c, 4), None, c.rope(interleaved=True))


def _parallel(c: ConfigReader, widths: tuple[int, ...], full: RopeFacts | None, local: RopeFacts | None) -> ModelConfig:
    """Attention and feed-forward part side by side behind one layer norm without bias."""
    norm, mlp, biased = layer_norm(c, "layer_norm_eps", bias=False), gated_mlp(c), c.flag("attention_bias")
    common = {"qkv_bias": biased, "out_bias": biased}
    mixers = [attention(c, rope=local if w else full, window=w, **common) for w in widths]
    head = HeadFacts(norm, tied=bool(c.get("tie_word_embeddings")), scale=float(c.get("logit_scale")))
    return model(c, [parallel_layer(mixer, mlp, norm) for mixer in mixers], head=head)


def _gpt_oss(c: ConfigReader) -> ModelConfig:
    rope, norm, biased = c.rope(), rms(c), c.flag("attention_bias")
    mixture = replace(
        experts(c, "intermediate_size", normalise=True, bias=True),
        bias=True, limit=float(c.get("swiglu_limit")), slope=float(c.get("swiglu_alpha")), up_offset=1.0,
    )  # fmt: skip
    common = {"rope": rope, "qkv_bias": biased, "out_bias": biased, "sinks": True}
    mixers = [attention(c, window=window, **common) for window in windows(c, 2)]
    return model(c, [pre_norm_layer(mixer, mixture, norm) for mixer in mixers])


def _llama4(c: ConfigReader) -> ModelConfig:
    norm, rope, biased = rms(c), c.rope(interleaved=True), c.flag("attention_bias")
    tuned = TemperatureFacts(c.get("floor_scale"), float(c.get("attn_scale")), offset=1)
    # a rotation leaves the length of a head as it is, so that this norm may stand before it
    qk_norm = NormFacts(eps=norm.eps, weight=False) if c.get("use_qk_norm") else None
    rotated = {"rope": rope, "qk_norm": qk_norm, "chunk": c.get("attention_chunk_size") or 0}
    unrotated = {"rope": None, "temperature": tuned if c.get("attn_temperature_tuning") else None}
    mixers = [
        attention(c, qkv_bias=biased, out_bias=biased, **(rotated if turns else unrotated))
        for turns in rotated_layers(c)
    ]
    return model(c, [pre_norm_layer(m, ff, norm) for m, ff in zip(mixers, _llama4_feed_forwards(c), strict=True)])


def _llama4_feed_forwards(c: ConfigReader) -> list[Any]:
    step = c.get("interleave_moe_layer_step") or 1
    sparse = c.get("moe_layers")
    sparse = range(step - 1, c.num_layers, step) if sparse is None else sparse
    width = c.positive("intermediate_size")
    mixture = replace(
        experts(c, "intermediate_size", score="sigmoid", on_input=True),
        shared=gated_mlp(c, width=width, prefix="shared_expert"), prefix="feed_forward",
    )  # fmt: skip
    dense = gated_mlp(c, width=c.positive("intermediate_size_mlp"), prefix="feed_forward")
    return [mixture if i in sparse else dense for i in range(c.num_layers)]


def turned(matrices: Tensor, c: ConfigReader) -> Tensor:
    """Experts' matrices stored as [E, in, out], as [E, out, in]."""
    return matrices.transpose(-1, -2)


def _gates_first(rows: Tensor) -> Tensor:
    """Rows gate, up, gate, up ... of dimension 1, all gates before all ups."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)


_LAYER = r"(model\.layers\.\d+\.)"
_GEMMA = COMMON | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "head_dim": 256,
                   "num_key_value_heads": 4, "tie_word_embeddings": True, "sliding_window": 4096}  # fmt: skip
_COHERE = COMMON | {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "max_position_embeddings": 8192, "rope_theta": 500_000.0,
                    "tie_word_embeddings": True}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "gemma2": Family(
        _gemma2,
        _GEMMA
        | {
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": Family(_gemma3, _GEMMA | {"max_position_embeddings": 131_072, "rope_theta": 1_000_000.0}),
    "olmo3": Family(
        _olmo3,
        COMMON
        | {
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "rope_theta": 500_000.0,
        },
    ),
    "cohere": Family(_cohere, _COHERE),
    "cohere2": Family(_cohere2, _COHERE | {"sliding_window": 4096}),
    "gpt_oss": Family(
        _gpt_oss,
        COMMON
        | {
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "attention_bias": True,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "rope_theta": 150_000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        names=[
            (_LAYER + r"mlp\.router\.(weight|bias)", [(r"\1mlp.gate.\2", None)]),
            (
                _LAYER + r"mlp\.experts\.gate_up_proj",
                [(r"\1mlp.experts.gate_up_proj", lambda x, c: _gates_first(turned(x, c)))],
            ),
            (
                _LAYER + r"mlp\.experts\.gate_up_proj_bias",
                [(r"\1mlp.experts.gate_up_proj_bias", lambda x, c: _gates_first(x))],
            ),
            (_LAYER + r"mlp\.experts\.down_proj", [(r"\1mlp.experts.down_proj", turned)]),
        ],
    ),
    "llama4": Family(
        _llama4,
        COMMON
        | {
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "num_experts": 16,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 16_384,
            "use_qk_norm": True,
            "attention_chunk_size": 8192,
            "no_rope_layer_interval": 4,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "intermediate_size": 8192,
            "rope_theta": 500_000.0,
        },
        names=[
            (_LAYER + r"feed_forward\.router\.weight", [(r"\1feed_forward.gate.weight", None)]),
            (_LAYER + r"feed_forward\.experts\.gate_up_proj", [(r"\1feed_forward.experts.gate_up_proj", turned)]),
            (_LAYER + r"feed_forward\.experts\.down_proj", [(r"\1feed_forward.experts.down_proj", turned)]),
        ],
    ),
}
