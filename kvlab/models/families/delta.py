"""Hybrids of attention with layers that keep a small state: gated delta nets, Kimi delta attention, short convolutions.

Defaults are those of transformers' configuration classes. Source: transformers 5.24.0,
models/<family>/configuration_<family>.py and modeling_<family>.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from kvlab.models.facts import HeadFacts, MLPFacts, ModelConfig, NormFacts
from kvlab.models.families.common import Cut, Family, Rename, attention, gated_mlp, model, pre_norm_layer, rms
from kvlab.models.families.latent import latent_attention, sparse_layers
from kvlab.models.families.moe import experts, sparse_steps
from kvlab.models.families.reader import ConfigReader
from kvlab.models.modules.gated_delta import GatedDeltaFacts
from kvlab.models.modules.kda import KDAFacts
from kvlab.models.modules.moe import MoEFacts
from kvlab.models.modules.short_conv import ShortConvFacts

_LAYER = r"(model\.layers\.\d+\.)"


def layer_types(c: ConfigReader) -> tuple[str, ...]:
    """ "linear_attention" or "full_attention" per layer: as listed, else attention in every 4th."""
    period = c.get("full_attention_interval", 4)
    usual = ["full_attention" if (i + 1) % period == 0 else "linear_attention" for i in range(c.num_layers)]
    return c.per_layer("layer_types", tuple(c.get("layer_types") or usual))


def gated_delta_net(c: ConfigReader) -> GatedDeltaFacts:
    """The gated delta net of a Qwen config."""
    sizes = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    return GatedDeltaFacts(
        *(c.positive(name) for name in (*sizes, "linear_conv_kernel_dim")), activation=c.activation(), norm=rms(c)
    )


def qwen_hybrid(feed_forwards: Callable[[ConfigReader], tuple[Any, ...]]) -> Callable[[ConfigReader], ModelConfig]:
    """A builder of decoders with gated delta nets between layers of gated attention; norms store weight - 1."""

    def build(c: ConfigReader) -> ModelConfig:
        norm, bias = rms(c, offset=1.0), c.flag("attention_bias")
        mixers = {
            "full_attention": attention(
                c, rope=c.rope(), qk_norm=norm, output_gate=True, qkv_bias=bias, out_bias=bias
            ),
            "linear_attention": gated_delta_net(c),
        }  # fmt: skip
        layers = [
            pre_norm_layer(mixers[kind], feed_forward, norm)
            for kind, feed_forward in zip(layer_types(c), feed_forwards(c), strict=True)
        ]
        return model(c, layers, head=HeadFacts(norm=norm, tied=bool(c.get("tie_word_embeddings"))))

    return build


def qwen_experts(c: ConfigReader) -> MoEFacts:
    """Routed experts and a shared one behind a gate of its own."""
    mixture = experts(c, normalise=bool(c.get("norm_topk_prob")))
    shared = MLPFacts(c.positive("shared_expert_intermediate_size"), c.activation(), prefix="shared_expert")
    return replace(mixture, shared=shared, shared_gate=True)


def split_heads(pieces: Callable[[ConfigReader], tuple[int, list[int]]], wanted: int) -> Cut:
    """A cut of rows that lie head by head, each head's pieces side by side: all heads of piece `wanted`.

    `pieces` gives the number of heads and the rows of each piece of a head.
    """

    def cut(tensor: Tensor, c: ConfigReader) -> Tensor:
        heads, rows = pieces(c)
        return tensor.unflatten(0, (heads, sum(rows))).split(rows, dim=1)[wanted].flatten(0, 1)

    return cut


def _query_and_gate(c: ConfigReader) -> tuple[int, list[int]]:
    heads, _, width = c.heads()
    return heads, [width, width]


def _qkvz(c: ConfigReader) -> tuple[int, list[int]]:
    f = gated_delta_net(c)
    value = f.num_value_heads // f.num_key_heads * f.value_dim
    return f.num_key_heads, [f.key_dim, f.key_dim, value, value]


def _ba(c: ConfigReader) -> tuple[int, list[int]]:
    f = gated_delta_net(c)
    return f.num_key_heads, [f.num_value_heads // f.num_key_heads] * 2


GATED_QUERY: Rename = (
    _LAYER + r"self_attn\.q_proj\.(weight|bias)",
    [(rf"\1self_attn.{name}_proj.\2", split_heads(_query_and_gate, i)) for i, name in enumerate(("q", "gate"))],
)
QWEN3_NEXT: list[Rename] = [
    GATED_QUERY,
    (
        _LAYER + r"linear_attn\.in_proj_qkvz\.weight",
        [(rf"\1linear_attn.in_proj_{name}.weight", split_heads(_qkvz, i)) for i, name in enumerate("qkvz")],
    ),
    (
        _LAYER + r"linear_attn\.in_proj_ba\.weight",
        [(rf"\1linear_attn.in_proj_{name}.weight", split_heads(_ba, i)) for i, name in enumerate("ba")],
    ),
]


def short_conv_hybrid(
    feed_forwards: Callable[[ConfigReader], tuple[Any, ...]],
) -> Callable[[ConfigReader], ModelConfig]:
    """A builder of decoders with short convolutions between layers of attention (LFM2)."""

    def build(c: ConfigReader) -> ModelConfig:
        norm, where = NormFacts(eps=float(c.get("norm_eps"))), c.get("full_attn_idxs")
        usual = ["full_attention" if where is None or i in where else "conv" for i in range(c.num_layers)]
        mixers = {
            "full_attention": attention(c, rope=c.rope(), qk_norm=norm),
            "conv": ShortConvFacts(c.positive("conv_L_cache"), bias=c.flag("conv_bias")),
        }
        kinds = c.per_layer("layer_types", tuple(c.get("layer_types") or usual))
        layers = [
            pre_norm_layer(mixers[kind], feed_forward, norm)
            for kind, feed_forward in zip(kinds, feed_forwards(c), strict=True)
        ]
        return model(c, layers, head=HeadFacts(norm=norm, tied=bool(c.get("tie_word_embeddings"))))

    return build


def lfm2_mlps(c: ConfigReader) -> tuple[MLPFacts, ...]:
    """The same in every layer: two thirds of the stated width times a factor, rounded up, unless told not to."""
    width = c.positive("intermediate_size")
    if c.get("block_auto_adjust_ff_dim"):
        width = int(2 * width / 3)
        if (factor := c.get("block_ffn_dim_multiplier")) is not None:
            multiple = c.positive("block_multiple_of")
            width = multiple * -(-int(factor * width) // multiple)
    return (MLPFacts(width),) * c.num_layers


def lfm2_experts(c: ConfigReader) -> tuple[Any, ...]:
    """Experts from layer `num_dense_layers` on, chosen by sigmoid scores and a correction for the choice alone."""
    router = {"score": "sigmoid", "floor": 1e-6, "normalise": bool(c.get("norm_topk_prob"))}
    router |= {"correction": c.flag("use_expert_bias"), "scale": float(c.get("routed_scaling_factor"))}
    mixture, dense = experts(c, **router), MLPFacts(c.positive("intermediate_size"))
    return tuple(dense if i < c.get("num_dense_layers") else mixture for i in range(c.num_layers))


def kimi_experts(c: ConfigReader) -> MoEFacts:
    """DeepSeek-V3's router under Kimi's names, and a shared expert."""
    groups, top = c.get("num_expert_group") or c.get("n_group") or 1, c.get("topk_group") or 1
    renormalise = c.get("moe_renormalize")
    router = {
        "score": "sigmoid", "correction": True, "num_groups": groups, "top_groups": 0 if groups == top else top,
        "group_members": 1 if groups == top else 2, "floor": 1e-20, "scale": float(c.get("routed_scaling_factor")),
        "normalise": bool(c.get("norm_topk_prob") if renormalise is None else renormalise),
    }  # fmt: skip
    mixture = experts(c, **router)
    width = mixture.width * c.positive("n_shared_experts")
    return replace(mixture, shared=gated_mlp(c, width=width, prefix="shared_experts"))


def kimi_linear(c: ConfigReader) -> ModelConfig:
    """Kimi delta attention between layers of latent attention without rotation; experts after the first layers."""
    norm, linear = rms(c), c.get("linear_attn_config") or {}
    full, kernel = linear.get("full_attn_layers"), linear.get("short_conv_kernel_size")
    types = c.get("layer_types")
    if types is None:
        # their layers are counted from 1
        attends = [i + 1 in full if full is not None else i > 0 and i % 4 == 0 for i in range(c.num_layers)]
        types = ["full_attention" if a else "linear_attention" for a in attends]
    heads, width = (linear.get(n) or c.positive(f"linear_{n}") for n in ("num_heads", "head_dim"))
    mixers = {
        "full_attention": replace(latent_attention(c), rope=None),
        "linear_attention": KDAFacts(
            heads, width, kernel or c.positive("linear_conv_kernel_dim"), activation=c.activation(), norm=norm
        ),
    }
    feed_forward = {True: kimi_experts(c), False: gated_mlp(c)}
    layers = [
        pre_norm_layer(mixers[kind], feed_forward[sparse], norm)
        for kind, sparse in zip(c.per_layer("layer_types", tuple(types)), sparse_layers(c), strict=True)
    ]
    return model(c, layers, max_position=c.get("model_max_length") or c.positive("max_position_embeddings"))


_QWEN: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False,
    "attention_bias": False, "partial_rotary_factor": 0.25, "norm_topk_prob": True,
}  # fmt: skip
_LFM2: dict[str, Any] = {
    "norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True, "conv_bias": False, "norm_topk_prob": True,
    "use_expert_bias": True, "routed_scaling_factor": 1.0, "hidden_act": "silu",
}  # fmt: skip
LFM2: list[Rename] = [
    (r"model\.embedding_norm\.weight", [("model.norm.weight", None)]),
    (_LAYER + r"operator_norm\.weight", [(r"\1input_layernorm.weight", None)]),
    (_LAYER + r"ffn_norm\.weight", [(r"\1post_attention_layernorm.weight", None)]),
    (_LAYER + r"self_attn\.out_proj\.weight", [(r"\1self_attn.o_proj.weight", None)]),
    (_LAYER + r"self_attn\.([qk])_layernorm\.weight", [(r"\1self_attn.\2_norm.weight", None)]),
    (_LAYER + r"feed_forward\.(|experts\.\d+\.)w1\.weight", [(r"\1mlp.\2gate_proj.weight", None)]),
    (_LAYER + r"feed_forward\.(|experts\.\d+\.)w2\.weight", [(r"\1mlp.\2down_proj.weight", None)]),
    (_LAYER + r"feed_forward\.(|experts\.\d+\.)w3\.weight", [(r"\1mlp.\2up_proj.weight", None)]),
    (_LAYER + r"feed_forward\.expert_bias", [(r"\1mlp.gate.e_score_correction_bias", None)]),
    (_LAYER + r"feed_forward\.(.*)", [(r"\1mlp.\2", None)]),
]
KIMI: list[Rename] = [
    # published files have the decay's tensors beside the others, transformers in a module of their own
    (_LAYER + r"self_attn\.(?:forget_gate\.)?A_log", [(r"\1self_attn.A_log", lambda a, c: a.flatten())]),
    (_LAYER + r"self_attn\.forget_gate\.(.*)", [(r"\1self_attn.\2", None)]),
    (_LAYER + r"block_sparse_moe\.experts\.(\d+)\.w1\.weight", [(r"\1mlp.experts.\2.gate_proj.weight", None)]),
    (_LAYER + r"block_sparse_moe\.experts\.(\d+)\.w2\.weight", [(r"\1mlp.experts.\2.down_proj.weight", None)]),
    (_LAYER + r"block_sparse_moe\.experts\.(\d+)\.w3\.weight", [(r"\1mlp.experts.\2.up_proj.weight", None)]),
    (_LAYER + r"block_sparse_moe\.(.*)", [(r"\1mlp.\2", None)]),
]
# layers that predict further tokens are no part of the decoder
_MTP = (r"^mtp\.",)

FAMILIES: dict[str, Family] = {
    "qwen3_next": Family(qwen_hybrid(lambda c: sparse_steps(c, qwen_experts(c))), _QWEN, QWEN3_NEXT, _MTP),
    "qwen3_5": Family(qwen_hybrid(lambda c: (gated_mlp(c),) * c.num_layers), _QWEN, [GATED_QUERY], _MTP),
    "qwen3_5_moe": Family(qwen_hybrid(lambda c: (qwen_experts(c),) * c.num_layers), _QWEN, [GATED_QUERY], _MTP),
    "lfm2": Family(short_conv_hybrid(lfm2_mlps), _LFM2, LFM2),
    "lfm2_moe": Family(short_conv_hybrid(lfm2_experts), _LFM2, LFM2),
    "kimi_linear": Family(
        kimi_linear,
        {
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "routed_scaling_factor": 2.446,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
        },
        KIMI,
    ),
}
