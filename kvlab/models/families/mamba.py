"""Mamba and Mamba-2: alone, between layers of attention, and beside attention in every layer.

Defaults are those of transformers' configuration classes. Source: transformers 5.24.0,
models/<family>/configuration_<family>.py and modeling_<family>.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvlab.models.facts import Branch, HeadFacts, LayerFacts, ModelConfig, NormFacts
from kvlab.models.families.common import Family, Rename, attention, gated_mlp, model, pre_norm_layer, rms
from kvlab.models.families.moe import experts
from kvlab.models.families.reader import ConfigReader
from kvlab.models.modules.mamba1 import Mamba1Facts
from kvlab.models.modules.mamba2 import GatedNormFacts, Mamba2Facts

_LAYER = r"(model\.layers\.\d+\.)"
LEGACY = {"mamba": "linear_attention", "attention": "full_attention"}


def layer_types(c: ConfigReader, usual: list[str]) -> tuple[str, ...]:
    """The kind of each layer, under transformers' present names: as listed, else `usual`."""
    listed = c.get("layer_types") or usual
    return c.per_layer("layer_types", tuple(LEGACY.get(kind, kind) for kind in listed))


def mamba1(c: ConfigReader, norm: NormFacts | None) -> Mamba1Facts:
    """The Mamba mixer of a config; `norm` is that of step, B and C."""
    rank = c.get("time_step_rank")
    # in a hybrid intermediate_size is that of the feed-forward parts
    stated = c.config.get("intermediate_size") if c.family in ("mamba", "falcon_mamba") else None
    return Mamba1Facts(
        inner=stated or c.positive("expand") * c.hidden_size,
        state_size=c.positive("state_size"),
        kernel=c.positive("conv_kernel"),
        dt_rank=math.ceil(c.hidden_size / 16) if rank in (None, "auto") else rank,
        activation=c.activation(),
        norm=norm,
        conv_bias=c.flag("conv_bias"),
        bias=c.flag("mamba_bias"),
    )


def mamba2(c: ConfigReader, eps: float, sizes: tuple[int, int] | None = None, **facts: Any) -> Mamba2Facts:
    """The Mamba-2 mixer of a config, its result normed over each group.

    Args:
        sizes: heads and their width where the config's words are not the usual ones.
        facts: what differs.
    """
    heads, width = sizes or mamba2_heads(c)
    low, high = c.get("time_step_limit") or (0.0, math.inf)
    groups = c.positive("n_groups")
    usual: dict[str, Any] = {
        "num_groups": groups,
        "state_size": c.positive("state_size"),
        "kernel": c.positive("conv_kernel"),
        "activation": c.activation(),
        "norm": GatedNormFacts(eps, groups),
        "conv_bias": c.flag("conv_bias"),
        "bias": c.flag("mamba_bias"),
        "dt_min": float(low),
        "dt_max": float(high),
    }
    return Mamba2Facts(num_heads=heads, head_dim=width, **usual | facts)


def mamba2_heads(c: ConfigReader) -> tuple[int, int]:
    """Heads of a Mamba-2 mixer and their width; "auto" or a missing one follows from the inner width.

    Raises:
        ValueError: heads that do not divide the inner width, or stated sizes that disagree with it.
    """
    inner = c.get("mamba_d_ssm") or c.positive("expand") * c.hidden_size
    heads, width = c.positive("mamba_heads"), c.get("head_dim" if c.family == "mamba2" else "mamba_head_width")
    width = width if isinstance(width, int) else inner // heads
    # Nemotron-H's heads need not make up a multiple of the hidden size
    if heads * width != inner and c.family != "nemotron_h":
        raise ValueError(f"{heads} Mamba heads of {width}: must make up the inner width of {inner}")
    return heads, width


def _pure(mixer: Callable[[ConfigReader], Any]) -> Callable[[ConfigReader], ModelConfig]:
    """A builder of models whose layers are a norm and a mixer."""

    def build(c: ConfigReader) -> ModelConfig:
        norm = NormFacts(eps=float(c.get("layer_norm_epsilon")))
        layer = LayerFacts(((Branch(mixer(c), norm),),))
        head = HeadFacts(norm=norm, tied=bool(c.get("tie_word_embeddings")))
        return model(c, [layer] * c.num_layers, head=head)

    return build


def _falcon_mamba(c: ConfigReader) -> Mamba1Facts:
    return mamba1(c, NormFacts(eps=float(c.get("mixer_rms_eps")), weight=False))


def _codestral(c: ConfigReader) -> Mamba2Facts:
    return mamba2(c, float(c.get("layer_norm_epsilon")))


def _jamba(c: ConfigReader) -> ModelConfig:
    """Attention without rotation in one layer of a period, Mamba elsewhere; experts in every other layer."""
    norm = rms(c)
    mixers = {"full_attention": attention(c, rope=None), "linear_attention": mamba1(c, norm)}
    period, offset = c.positive("attn_layer_period"), c.get("attn_layer_offset")
    kinds = ["full_attention" if i % period == offset else "linear_attention" for i in range(c.num_layers)]
    dense, mixture = gated_mlp(c), experts(c, "intermediate_size")
    step, first = c.positive("expert_layer_period"), c.get("expert_layer_offset")
    sparse = [i % step == first and mixture.router.num_experts > 1 for i in range(c.num_layers)]
    layers = [
        pre_norm_layer(mixers[kind], mixture if has_experts else dense, norm)
        for kind, has_experts in zip(layer_types(c, kinds), sparse, strict=True)
    ]
    return model(c, layers)


def _bamba(c: ConfigReader) -> ModelConfig:
    """Attention of which half of each head rotates in the listed layers, Mamba-2 elsewhere."""
    norm, bias = rms(c), c.flag("attention_bias")
    mixers = {
        "full_attention": attention(c, rope=c.rope(), qkv_bias=bias, out_bias=bias),
        "linear_attention": mamba2(c, norm.eps),
    }
    listed = c.get("attn_layer_indices") or ()
    kinds = ["full_attention" if i in listed else "linear_attention" for i in range(c.num_layers)]
    mlp = gated_mlp(c, bias=c.flag("mlp_bias"))
    return model(c, [pre_norm_layer(mixers[kind], mlp, norm) for kind in layer_types(c, kinds)])


# what Jamba and its relatives call the parts that Llama has too
JAMBA_NAMES: list[Rename] = [
    (r"model\.final_layernorm\.weight", [("model.norm.weight", None)]),
    (_LAYER + r"pre_ff_layernorm\.weight", [(r"\1post_attention_layernorm.weight", None)]),
    (_LAYER + r"feed_forward\.router\.weight", [(r"\1mlp.gate.weight", None)]),
    (_LAYER + r"feed_forward\.(.*)", [(r"\1mlp.\2", None)]),
]
PURE_NAMES: list[Rename] = [
    (r"backbone\.embeddings\.weight", [("model.embed_tokens.weight", None)]),
    (r"backbone\.norm_f\.weight", [("model.norm.weight", None)]),
    (r"backbone\.(layers\.\d+)\.norm\.weight", [(r"model.\1.input_layernorm.weight", None)]),
    (r"backbone\.(layers\.\d+)\.mixer\.(.*)", [(r"model.\1.mamba.\2", None)]),
]
# a state does not grow, so nothing in these files bounds the length
_PURE: dict[str, Any] = {
    "hidden_act": "silu", "layer_norm_epsilon": 1e-5, "max_position_embeddings": 2**20, "use_bias": False,
    "use_conv_bias": True,
}  # fmt: skip
_HYBRID: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False}

FAMILIES: dict[str, Family] = {
    "mamba": Family(_pure(lambda c: mamba1(c, None)), _PURE, PURE_NAMES),
    "falcon_mamba": Family(_pure(_falcon_mamba), _PURE | {"mixer_rms_eps": 1e-6}, PURE_NAMES),
    "mamba2": Family(_pure(_codestral), _PURE | {"tie_word_embeddings": False}, PURE_NAMES),
    "jamba": Family(_jamba, _HYBRID | {"rms_norm_eps": 1e-6}, JAMBA_NAMES),
    "bamba": Family(_bamba, _HYBRID | {"partial_rotary_factor": 0.5}, JAMBA_NAMES),
}
