"""Llama-like layers whose feed-forward part is a mixture of experts.

Defaults are those of transformers' configuration classes. Source: transformers 5.24.0,
models/<family>/configuration_<family>.py and modeling_<family>.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvlab.models.facts import MLPFacts, ModelConfig
from kvlab.models.families.common import Family, attention, gated_mlp, model, pre_norm_layer, rms
from kvlab.models.families.dense import COMMON, Windows, same_window
from kvlab.models.families.reader import ConfigReader
from kvlab.models.modules.moe import MoEFacts
from kvlab.models.modules.router import RouterFacts


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
    rope, norm = c.rope(), rms(c)
    mixers = [attention(c, rope=rope, window=window, **facts) for window in windows(c)]
    return model(c, [pre_norm_layer(m, ff, norm) for m, ff in zip(mixers, feed_forwards, strict=True)])


Build = Callable[[ConfigReader], ModelConfig]
_QWEN3 = COMMON | {"max_position_embeddings": 32_768, "num_key_value_heads": 4, "decoder_sparse_step": 1}
_LAYER = r"(model\.layers\.\d+\.)"

FAMILIES: dict[str, Family] = {
    "mixtral": Family(
        _mixtral,
        COMMON | {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "rope_theta": 1e6},
        names=[
            (_LAYER + r"block_sparse_moe\.gate\.weight", [(r"\1mlp.gate.weight", None)]),
            (_LAYER + r"block_sparse_moe\.experts\.(\d+)\.w1\.weight", [(r"\1mlp.experts.\2.gate_proj.weight", None)]),
            (_LAYER + r"block_sparse_moe\.experts\.(\d+)\.w2\.weight", [(r"\1mlp.experts.\2.down_proj.weight", None)]),
            (_LAYER + r"block_sparse_moe\.experts\.(\d+)\.w3\.weight", [(r"\1mlp.experts.\2.up_proj.weight", None)]),
        ],
    ),
    "qwen3_moe": Family(_qwen3_moe, _QWEN3),
}
