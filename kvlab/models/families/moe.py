"""Llama-like layers whose feed-forward part is a mixture of experts.

Defaults are those of transformers' configuration classes. Source: transformers 5.24.0,
models/<family>/configuration_<family>.py and modeling_<family>.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvlab.models.facts import HeadFacts, MLPFacts, ModelConfig
from kvlab.models.families.common import Family, Rename, attention, gated_mlp, layer_norm, model, pre_norm_layer, rms
from kvlab.models.families.dense import COMMON, Windows, no_windows, same_window
from kvlab.models.families.reader import ConfigReader
from kvlab.models.modules.moe import MoEFacts
from kvlab.models.modules.router import MIXER, RouterFacts


def experts(c: ConfigReader, width: str = "moe_intermediate_size", **router: Any) -> MoEFacts:
    """The config's experts of that width under a router of `router`'s facts."""
    return MoEFacts(
        RouterFacts(c.positive("num_experts"), c.positive("num_experts_per_tok"), **router),
        width=c.positive(width),
        activation=c.activation(),
    )


def every_layer(c: ConfigReader, mixture: MoEFacts) -> tuple[Any, ...]:
    """The mixture in every layer."""
    return (mixture,) * c.num_layers


def sparse_steps(c: ConfigReader, mixture: MoEFacts) -> tuple[Any, ...]:
    """The mixture in every `decoder_sparse_step`-th layer that `mlp_only_layers` does not list (Qwen)."""
    step, dense = c.get("decoder_sparse_step") or 1, c.get("mlp_only_layers") or ()
    sparse = [(i + 1) % step == 0 and i not in dense for i in range(c.num_layers)]
    return tuple(mixture if is_sparse else gated_mlp(c) for is_sparse in sparse)


def _mixtral(c: ConfigReader) -> ModelConfig:
    mixture = experts(c, "intermediate_size", normalise=True)
    return _llama_like(c, same_window, every_layer(c, mixture))


def _qwen3_moe(c: ConfigReader) -> ModelConfig:
    mixture = experts(c, normalise=bool(c.get("norm_topk_prob")))
    biases = {"qkv_bias": c.flag("attention_bias"), "out_bias": c.flag("attention_bias")}
    return _llama_like(c, switched_window, sparse_steps(c, mixture), qk_norm=rms(c), **biases)


def switched_window(c: ConfigReader) -> tuple[int, ...]:
    """`sliding_window` for every layer where `use_sliding_window` is set."""
    return ((c.get("sliding_window") or 0) if c.get("use_sliding_window") else 0,) * c.num_layers


def shared_expert(c: ConfigReader, width: int, prefix: str = "shared_experts") -> MLPFacts:
    """An expert that every token runs through."""
    return gated_mlp(c, width=width, prefix=prefix)


def _llama_like(c: ConfigReader, windows: Windows, feed_forwards: tuple[Any, ...], **facts: Any) -> ModelConfig:
    """Pre-norm layers of rotated attention with those feed-forward parts."""
    norm, facts = rms(c), {"rope": c.rope()} | facts
    mixers = [attention(c, window=window, **facts) for window in windows(c)]
    return model(c, [pre_norm_layer(m, ff, norm) for m, ff in zip(mixers, feed_forwards, strict=True)])


def _qwen2_moe(c: ConfigReader) -> ModelConfig:
    c.refuse("use_sliding_window")
    mixture = replace(
        experts(c, normalise=bool(c.get("norm_topk_prob"))),
        shared=gated_mlp(c, width=c.positive("shared_expert_intermediate_size"), prefix="shared_expert"),
        shared_gate=True,
    )
    return _llama_like(c, no_windows, sparse_steps(c, mixture), qkv_bias=c.flag("qkv_bias"))


def _minimax_m2(c: ConfigReader) -> ModelConfig:
    mixture = experts(c, "intermediate_size", score="sigmoid", correction=True, normalise=True)
    facts = {"rope": c.rope(dim=c.get("rotary_dim") or 0), "qk_norm": rms(c), "qk_norm_wide": True}
    return _llama_like(c, no_windows, every_layer(c, mixture), **facts)


def _glm4_moe(c: ConfigReader) -> ModelConfig:
    groups = {"scale": float(c.get("routed_scaling_factor"))}
    if (c.get("n_group") or 1) > 1:
        groups |= {"num_groups": c.get("n_group"), "top_groups": c.get("topk_group"), "group_members": 2}
    routing = {"score": "sigmoid", "correction": True, "normalise": bool(c.get("norm_topk_prob")), "floor": 1e-20}
    shared = gated_mlp(
        c, width=c.positive("moe_intermediate_size") * c.get("n_shared_experts"), prefix="shared_experts"
    )
    mixture = replace(experts(c, **routing, **groups), shared=shared)
    first = c.get("first_k_dense_replace")
    parts = tuple(gated_mlp(c) if i < first else mixture for i in range(c.num_layers))
    facts = {"qkv_bias": c.flag("attention_bias"), "qk_norm": rms(c) if c.get("use_qk_norm") else None}
    return _llama_like(c, no_windows, parts, **facts)


def _phimoe(c: ConfigReader) -> ModelConfig:
    norm, biased = layer_norm(c, "rms_norm_eps"), c.flag("attention_bias")
    mixture = experts(c, "intermediate_size", score=MIXER, jitter=float(c.get("router_jitter_noise")))
    rope = c.rope()
    # transformers turns by the short divisors at every length
    rope = replace(rope, divisors=rope.short_divisors)
    mixer = attention(c, rope=rope, window=c.get("sliding_window") or 0, qkv_bias=biased, out_bias=biased)
    head = HeadFacts(norm, tied=bool(c.get("tie_word_embeddings")), bias=c.flag("lm_head_bias"))
    return model(c, [pre_norm_layer(mixer, mixture, norm)] * c.num_layers, head=head)


_QWEN3 = COMMON | {"max_position_embeddings": 32_768, "num_key_value_heads": 4, "decoder_sparse_step": 1}
_LAYER = r"(model\.layers\.\d+\.)"

_BLOCK_SPARSE: list[Rename] = [
    (_LAYER + r"block_sparse_moe\.gate\.weight", [(r"\1mlp.gate.weight", None)]),
    (_LAYER + r"block_sparse_moe\.experts\.(\d+)\.w1\.weight", [(r"\1mlp.experts.\2.gate_proj.weight", None)]),
    (_LAYER + r"block_sparse_moe\.experts\.(\d+)\.w2\.weight", [(r"\1mlp.experts.\2.down_proj.weight", None)]),
    (_LAYER + r"block_sparse_moe\.experts\.(\d+)\.w3\.weight", [(r"\1mlp.experts.\2.up_proj.weight", None)]),
]

FAMILIES: dict[str, Family] = {
    "mixtral": Family(
        _mixtral,
        COMMON | {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "rope_theta": 1e6},
        names=_BLOCK_SPARSE,
    ),
    "qwen3_moe": Family(_qwen3_moe, _QWEN3),
    "qwen2_moe": Family(_qwen2_moe, _QWEN3 | {"num_key_value_heads": 16, "qkv_bias": True}),
    "minimax_m2": Family(
        _minimax_m2,
        COMMON
        | {
            "max_position_embeddings": 196_608,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 5e6,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
        names=[
            (_LAYER + r"mlp\.e_score_correction_bias", [(r"\1mlp.gate.e_score_correction_bias", None)]),
            *_BLOCK_SPARSE,
            (
                _LAYER + r"block_sparse_moe\.e_score_correction_bias",
                [(r"\1mlp.gate.e_score_correction_bias", None)],
            ),
        ],
    ),
    "glm4_moe": Family(
        _glm4_moe,
        COMMON
        | {
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "n_shared_experts": 1,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "moe_intermediate_size": 1408,
        },
    ),
    "phimoe": Family(
        _phimoe,
        COMMON
        | {
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.01,
            "lm_head_bias": False,
        },
        names=[(_LAYER + r"mlp\.router\.weight", [(r"\1mlp.gate.weight", None)]), *_BLOCK_SPARSE],
    ),
}
