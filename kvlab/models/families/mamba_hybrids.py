"""Hybrids of attention and Mamba-2 with rules of their own: factors everywhere, shared blocks, one part a layer.

Defaults are those of transformers' configuration classes. Source: transformers 5.24.0,
models/<family>/configuration_<family>.py and modeling_<family>.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from kvlab.models.facts import (
    AttentionFacts,
    Branch,
    EmbeddingFacts,
    HeadFacts,
    LayerFacts,
    MLPFacts,
    ModelConfig,
    NormFacts,
)
from kvlab.models.families.common import Family, Rename, attention, gated_mlp, model, pre_norm_layer, rms
from kvlab.models.families.mamba import JAMBA_NAMES, layer_types, mamba2
from kvlab.models.families.moe import experts
from kvlab.models.families.reader import ConfigReader
from kvlab.models.modules.mamba2 import GatedNormFacts, Mamba2Facts
from kvlab.models.modules.moe import MoEFacts
from kvlab.models.modules.router import RouterFacts
from kvlab.models.modules.shared_block import HybridLayerFacts, SharedBlockFacts, SharedBlocksFacts

_LAYER = r"(model\.layers\.\d+\.)"


def _granite(c: ConfigReader) -> ModelConfig:
    """By layer_types attention or Mamba-2; a feed-forward part for all tokens beside the experts, if there are any."""
    norm, bias = rms(c), c.flag("attention_bias")
    rope = c.rope() if c.get("position_embedding_type") == "rope" else None
    scale = float(c.get("attention_multiplier"))
    mixers = {
        "full_attention": attention(c, rope=rope, scale=scale, qkv_bias=bias, out_bias=bias),
        "linear_attention": mamba2(c, norm.eps),
    }
    shared = gated_mlp(c, width=c.positive("shared_intermediate_size"), prefix="shared_mlp")
    if c.get("num_experts"):
        feed_forward: Any = replace(experts(c, "intermediate_size", normalise=True), shared=shared)
    else:
        feed_forward = replace(shared, prefix="mlp.shared_mlp")
    kinds = layer_types(c, ["linear_attention"] * c.num_layers)
    layers = [pre_norm_layer(mixers[k], feed_forward, norm, float(c.get("residual_multiplier"))) for k in kinds]
    head = HeadFacts(norm=norm, tied=bool(c.get("tie_word_embeddings")), scale=1 / c.get("logits_scaling"))
    return model(c, layers, head=head, embedding=EmbeddingFacts(scale=float(c.get("embedding_multiplier"))))


def _falcon_h1(c: ConfigReader) -> ModelConfig:
    """Attention and Mamba-2 side by side in every layer, and a factor on nearly everything.

    Raises:
        ValueError: a bias on one of the mixer's projections alone.
    """
    if c.flag("projectors_bias") != c.flag("mamba_bias"):
        raise ValueError("projectors_bias: the engine runs a mixer with both biases or none")
    norm, bias, (_, _, head_dim) = rms(c), c.flag("attention_bias"), c.heads()
    scale = head_dim**-0.5 * c.get("key_multiplier")
    heads = attention(c, rope=c.rope(), scale=scale, qkv_bias=bias, out_bias=bias)
    names = ("gate_scale", "x_scale", "b_scale", "c_scale", "dt_scale")
    scales = dict(zip(names, map(float, c.get("ssm_multipliers") or (1,) * 5), strict=True))
    normed = GatedNormFacts(norm.eps, c.positive("n_groups"), c.flag("mamba_norm_before_gate"))
    mixer = mamba2(c, norm.eps, norm=normed if c.flag("mamba_rms_norm") else None, **scales)
    gate, down = map(float, c.get("mlp_multipliers") or (1, 1))
    attend, recur = (
        {"scale": float(c.get(f"{n}_out_multiplier")), "in_scale": float(c.get(f"{n}_in_multiplier"))}
        for n in ("attention", "ssm")
    )
    mlp = gated_mlp(c, bias=c.flag("mlp_bias"), gate_scale=gate)
    feed_forward = Branch(mlp, norm, "post_attention_layernorm", scale=down)
    layer = LayerFacts(((Branch(heads, norm, **attend), Branch(mixer, norm, **recur)), (feed_forward,)))
    tied = bool(c.get("tie_word_embeddings"))
    head = HeadFacts(norm=norm, tied=tied, scale=float(c.get("lm_head_multiplier")))
    embedding = EmbeddingFacts(scale=float(c.get("embedding_multiplier")))
    return model(c, [layer] * c.num_layers, head=head, embedding=embedding)


def _nemotron_h(c: ConfigReader) -> ModelConfig:
    """One part per layer: Mamba-2, attention without rotation, a feed-forward part, or experts.

    Raises:
        ValueError: biases around experts in a narrower space.
    """
    eps = float(c.get("layer_norm_epsilon"))
    norm, bias = NormFacts(eps=eps), c.flag("attention_bias")
    low = {"dt_min": float(c.get("time_step_min")), "dt_max": math.inf}
    parts: dict[str, Any] = {
        "linear_attention": mamba2(c, eps, activation=c.activation("mamba_hidden_act"), prefix="mixer", **low),
        "full_attention": attention(c, rope=None, qkv_bias=bias, out_bias=bias, prefix="mixer"),
        "mlp": _relu2(c, c.positive("intermediate_size"), "mixer"),
        "moe": _nemotron_experts(c),
    }
    layers = [LayerFacts(((Branch(parts[kind], norm, "norm"),),)) for kind in _nemotron_kinds(c)]
    return model(c, layers, head=HeadFacts(norm=norm, tied=bool(c.get("tie_word_embeddings"))))


def _nemotron_kinds(c: ConfigReader) -> list[str]:
    letters = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    listed = c.get("layer_types") or [letters[x] for x in c.get("hybrid_override_pattern")]
    return [{"mamba": "linear_attention", "attention": "full_attention"}.get(kind, kind) for kind in listed]


def _relu2(c: ConfigReader, width: int, prefix: str) -> MLPFacts:
    act = c.activation("mlp_hidden_act")
    return MLPFacts(width, act, gated=False, bias=c.flag("mlp_bias"), prefix=prefix)


def _nemotron_experts(c: ConfigReader) -> MoEFacts:
    groups, latent = c.get("n_group"), c.get("moe_latent_size") or 0
    if latent and c.flag("mlp_bias"):
        raise ValueError("mlp_bias: the engine runs experts in a narrower space without biases")
    router = RouterFacts(
        c.positive("num_experts"), c.positive("num_experts_per_tok"), score="sigmoid", correction=True,
        num_groups=groups, top_groups=c.get("topk_group") if groups > 1 else 0, group_members=2 if groups > 1 else 1,
        normalise=c.flag("norm_topk_prob"), floor=1e-20, scale=float(c.get("routed_scaling_factor")),
    )  # fmt: skip
    shared = _relu2(c, c.positive("moe_shared_expert_intermediate_size"), "shared_experts")
    act, width = c.activation("mlp_hidden_act"), c.positive("moe_intermediate_size")
    return MoEFacts(router, width, act, gated=False, latent=latent, shared=shared, prefix="mixer")


def _zamba2(c: ConfigReader) -> ModelConfig:
    """Mamba-2 in every layer; before some of them one of a few shared blocks of attention and feed-forward.

    Raises:
        ValueError: biases on its projections.
    """
    if c.flag("add_bias_linear"):
        raise ValueError("add_bias_linear: the engine runs this family without biases")
    norm, mixer = rms(c), _zamba2_mixer(c)
    kinds = layer_types(c, [])
    homes = [i for i, kind in enumerate(kinds) if kind == "hybrid"]
    count = c.get("num_mem_blocks")
    blocks = tuple(_shared_block(c, norm, home, range(b, len(homes), count)) for b, home in enumerate(homes[:count]))
    plain = LayerFacts(((Branch(mixer, norm),),))
    hybrid = replace(mixer, prefix="mamba_decoder.mamba")
    layers = [HybridLayerFacts(homes.index(i) % count, homes.index(i), hybrid, norm) if i in homes else plain
              for i in range(c.num_layers)]  # fmt: skip
    return model(c, layers, extra=SharedBlocksFacts(blocks))


def _zamba2_mixer(c: ConfigReader) -> Mamba2Facts:
    inner = c.positive("expand") * c.hidden_size
    stated, width = c.config.get("n_mamba_heads"), c.config.get("mamba_headdim")
    heads = stated or (inner // width if width else c.positive("mamba_heads"))
    # the class fixes what its config does not say
    fixed = {"dt_min": float(c.get("time_step_min")), "activation": "silu", "conv_bias": True, "bias": False}
    return mamba2(c, 1e-5, sizes=(heads, inner // heads), **fixed)


def _shared_block(c: ConfigReader, norm: NormFacts, home: int, uses: range) -> SharedBlockFacts:
    query, kv, _ = c.heads()
    width = 2 * c.hidden_size // query
    rope = replace(c.rope(), dim=0) if c.flag("use_mem_rope") else None
    return SharedBlockFacts(
        attention=AttentionFacts(query, kv, width, width, scale=(width / 2) ** -0.5, rope=rope),
        mlp=gated_mlp(c, prefix="feed_forward"),
        norm=norm,
        home=home,
        uses=tuple(uses),
        rank=c.config.get("adapter_rank") or c.config.get("lora_rank") or c.positive("adapter_rank"),
        attention_adapters=c.flag("use_shared_attention_adapter") or c.flag("use_shared_attention_lora"),
    )


_GRANITE_NAMES: list[Rename] = [
    (_LAYER + r"block_sparse_moe\.router(?:\.layer)?\.weight", [(r"\1mlp.gate.weight", None)]),
    (_LAYER + r"block_sparse_moe\.input_linear\.weight", [(r"\1mlp.experts.gate_up_proj", None)]),
    (_LAYER + r"block_sparse_moe\.output_linear\.weight", [(r"\1mlp.experts.down_proj", None)]),
    (_LAYER + r"block_sparse_moe\.experts\.(.*)", [(r"\1mlp.experts.\2", None)]),
    (_LAYER + r"shared_mlp\.input_linear\.weight", [(r"\1mlp.shared_mlp.gate_up_proj.weight", None)]),
    (_LAYER + r"shared_mlp\.output_linear\.weight", [(r"\1mlp.shared_mlp.down_proj.weight", None)]),
]
_NEMOTRON_NAMES: list[Rename] = [
    (r"(?:model|backbone)\.embeddings\.weight", [("model.embed_tokens.weight", None)]),
    (r"(?:model|backbone)\.norm_f\.weight", [("model.norm.weight", None)]),
    (r"(?:model|backbone)\.(.*)\.fc1_latent_proj\.(.*)", [(r"model.\1.latent_in.\2", None)]),
    (r"(?:model|backbone)\.(.*)\.fc2_latent_proj\.(.*)", [(r"model.\1.latent_out.\2", None)]),
    (r"backbone\.(.*)", [(r"model.\1", None)]),
]
_ZAMBA_NAMES: list[Rename] = [(r"model\.final_layernorm\.weight", [("model.norm.weight", None)])]
_HYBRID: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False}
_FACTORS = {
    f"{name}_multiplier": 1.0
    for name in ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out", "residual",
                 "attention")
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "granitemoehybrid": Family(_granite, _HYBRID | _FACTORS | {"rms_norm_eps": 1e-6, "logits_scaling": 1.0},
                               _GRANITE_NAMES),
    "falcon_h1": Family(_falcon_h1, _HYBRID | _FACTORS | {"mamba_norm_before_gate": True}, JAMBA_NAMES),
    "nemotron_h": Family(
        _nemotron_h,
        {
            "hidden_act": "silu", "layer_norm_epsilon": 1e-5, "time_step_min": 0.001, "mamba_hidden_act": "silu",
            "mlp_hidden_act": "relu2", "n_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
            "attention_bias": False, "mlp_bias": False,
        },
        _NEMOTRON_NAMES,
        (r"^mtp\.",),
    ),
    "zamba2": Family(
        _zamba2, {"hidden_act": "gelu", "rms_norm_eps": 1e-5, "time_step_min": 0.001, "num_mem_blocks": 1},
        _ZAMBA_NAMES,
    ),
}  # fmt: skip
