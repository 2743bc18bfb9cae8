"""Hybrids of attention with layers that keep a small state: gated delta nets, Kimi delta attention, short convolutions.

Defaults are those of transformers' configuration classes. Source: transformers 5.24.0,
models/<family>/configuration_<family>.py and modeling_<family>.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from kvlab.models.facts import HeadFacts, MLPFacts, ModelConfig
from kvlab.models.families.common import Cut, Family, Rename, attention, gated_mlp, model, pre_norm_layer, rms
from kvlab.models.families.moe import experts, sparse_steps
from kvlab.models.families.reader import ConfigReader
from kvlab.models.modules.gated_delta import GatedDeltaFacts
from kvlab.models.modules.moe import MoEFacts

_LAYER = r"(model\.layers\.\d+\.)"


def layer_types(c: ConfigReader) -> tuple[str, ...]:
    """"linear_attention" or "full_attention" per layer: as listed, else attention in every 4th."""
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
_QWEN: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False,
    "attention_bias": False, "partial_rotary_factor": 0.25, "norm_topk_prob": True,
}  # fmt: skip
# layers that predict further tokens are no part of the decoder
_MTP = (r"^mtp\.",)

FAMILIES: dict[str, Family] = {
    "qwen3_next": Family(qwen_hybrid(lambda c: sparse_steps(c, qwen_experts(c))), _QWEN, QWEN3_NEXT, _MTP),
    "qwen3_5": Family(qwen_hybrid(lambda c: (gated_mlp(c),) * c.num_layers), _QWEN, [GATED_QUERY], _MTP),
    "qwen3_5_moe": Family(qwen_hybrid(lambda c: (qwen_experts(c),) * c.num_layers), _QWEN, [GATED_QUERY], _MTP),
}
