"""Multi-head latent attention: DeepSeek's line and its relatives.

Source: transformers 5.24.0, models/<family>/configuration_<family>.py and modeling_<family>.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from kvlab.models.facts import EmbeddingFacts, HeadFacts, MLPFacts, ModelConfig, NormFacts
from kvlab.models.families.common import Family, gated_mlp, model, pre_norm_layer, rms
from kvlab.models.families.reader import ConfigReader
from kvlab.models.modules.indexed_mla import IndexedAttentionFacts, IndexerFacts, ReusedIndexFacts
from kvlab.models.modules.mla import LatentAttentionFacts
from kvlab.models.modules.moe import MoEFacts
from kvlab.models.modules.router import RouterFacts
from kvlab.specs.families import from_config

LATENT_NORM = NormFacts(eps=1e-6)  # the classes leave its eps at their default, whatever rms_norm_eps says


def latent_attention(c: ConfigReader, *, interleaved: bool | str = True) -> LatentAttentionFacts:
    """The latent attention of a config.

    Args:
        interleaved: how rotary values pair, or the field that says.

    Raises:
        ValueError: a config that turns latent attention off.
    """
    if c.get("use_mla") is False or not c.get("kv_lora_rank"):
        raise ValueError("kv_lora_rank, use_mla: a config of this family must have latent attention for the engine")
    heads, rotary = c.positive("num_attention_heads"), c.positive("qk_rope_head_dim")
    plain = c.positive("qk_nope_head_dim")
    return LatentAttentionFacts(
        heads,
        plain,
        rotary,
        c.get("v_head_dim") or c.hidden_size // heads,
        c.positive("kv_lora_rank"),
        query_rank=c.get("q_lora_rank") or 0,
        scale=(plain + rotary) ** -0.5 * stretched_scale(c),
        rope=c.rope(dim=rotary, interleaved=c.flag(interleaved)),
        norm=LATENT_NORM,
        bias=bool(c.get("attention_bias")),
    )


def stretched_scale(c: ConfigReader) -> float:
    """By how much scores grow where positions are stretched: (0.1 * mscale_all_dim * ln(factor) + 1) squared.

    Source: YaRN (arXiv 2309.00071), section 3.4; transformers 5.24.0 modeling_deepseek_v3.py, `yarn_apply_mscale`.
    """
    rule = c.get("rope_parameters") or c.get("rope_scaling") or {}
    share = rule.get("mscale_all_dim") or 0.0
    if rule.get("rope_type", rule.get("type", "default")) == "default" or not share or rule["factor"] <= 1:
        return 1.0
    return (0.1 * share * math.log(rule["factor"]) + 1.0) ** 2


def dense_mlp(c: ConfigReader) -> MLPFacts:
    """The feed-forward part of layers without experts."""
    return gated_mlp(c, bias=c.flag("mlp_bias"))


def experts(c: ConfigReader, router: RouterFacts) -> MoEFacts:
    """Routed experts and the shared one, as wide as `n_shared_experts` of them."""
    width = c.positive("moe_intermediate_size")
    shared = gated_mlp(
        c, width=width * c.positive("n_shared_experts"), bias=c.flag("mlp_bias"), prefix="shared_experts"
    )
    return MoEFacts(router, width, c.activation(), shared=shared)


def best_of_groups(c: ConfigReader) -> RouterFacts:
    """DeepSeek-V3's router: sigmoid scores, a correction for the choice alone, the best groups by their best two."""
    groups, top = c.get("n_group") or 1, c.get("topk_group") or 1
    return RouterFacts(
        c.positive("n_routed_experts"),
        c.positive("num_experts_per_tok"),
        score="sigmoid",
        correction=True,
        num_groups=groups,
        # all groups: no group is left out
        top_groups=0 if groups == top else top,
        group_members=1 if groups == top else 2,
        normalise=bool(c.get("norm_topk_prob")),
        floor=1e-20,
        scale=float(c.get("routed_scaling_factor")),
    )


def softmax_router(c: ConfigReader) -> RouterFacts:
    """DeepSeek-V2's router: softmax scores that are not normalised again, the best groups by their best one.

    Raises:
        ValueError: a topk_method the engine does not run.
    """
    method = c.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method {method!r}: the engine runs greedy and group_limited_greedy here")
    limited = method == "group_limited_greedy"
    return RouterFacts(
        c.positive("n_routed_experts"),
        c.positive("num_experts_per_tok"),
        num_groups=c.positive("n_group") if limited else 1,
        top_groups=c.positive("topk_group") if limited else 0,
        scale=float(c.get("routed_scaling_factor")),
    )


def sparse_layers(c: ConfigReader) -> tuple[bool, ...]:
    """Which layers have experts: as `mlp_layer_types` says, else all from layer `first_k_dense_replace` on."""
    if (types := c.get("mlp_layer_types")) is not None:
        return c.per_layer("mlp_layer_types", tuple(kind == "sparse" for kind in types))
    first = c.get("first_k_dense_replace", 1)
    return tuple(i >= first for i in range(c.num_layers))


Mixers = Callable[[ConfigReader], Sequence[Any]]


def all_latent(interleaved: bool | str) -> Mixers:
    """Latent attention over every earlier token in each layer."""
    return lambda c: [latent_attention(c, interleaved=interleaved)] * c.num_layers


def all_indexed(interleaved: bool) -> Mixers:
    """Latent attention over chosen tokens; `interleaved` says how the indexer's rotary values pair.

    A layer that `indexer_types` calls shared reads the choice of the last one that has an indexer.
    """

    def mixers(c: ConfigReader) -> list[Any]:
        attention = latent_attention(c)
        rotary = attention.rope_dim
        index = IndexerFacts(
            c.positive("index_n_heads"),
            c.positive("index_head_dim"),
            rotary,
            c.positive("index_topk"),
            rope=c.rope(dim=rotary, interleaved=interleaved),
        )
        found: list[Any] = []
        last = 0
        for i, kind in enumerate(indexer_types(c)):
            last = i if kind == "full" else last
            found.append(IndexedAttentionFacts(attention, index) if i == last else ReusedIndexFacts(attention, last))
        return found

    return mixers


def indexer_types(c: ConfigReader) -> Sequence[str]:
    """ "full" or "shared" for each layer, as the cache's facts have it: a layer with index keys is full.

    Raises:
        ValueError: the first layer has no indexer.
    """
    layers = from_config(c.config).layers
    kinds = ["full" if any(part.kind == "index" for part in layer.parts) else "shared" for layer in layers]
    if kinds[0] != "full":
        raise ValueError("indexer_types: the first layer must be full, there is no choice before it")
    return kinds


def deepseek(mixers: Mixers, router: Callable[[ConfigReader], RouterFacts]) -> Callable[[ConfigReader], ModelConfig]:
    """A builder of decoders with latent attention, dense first layers and experts after them."""

    def build(c: ConfigReader) -> ModelConfig:
        norm, sparse = rms(c), sparse_layers(c)
        feed_forward = {kind: experts(c, router(c)) if kind else dense_mlp(c) for kind in set(sparse)}
        layers = zip(mixers(c), sparse, strict=True)
        return model(c, [pre_norm_layer(mixer, feed_forward[kind], norm) for mixer, kind in layers])

    return build


def minicpm3(c: ConfigReader) -> ModelConfig:
    """Latent attention with scaled embeddings, branches and logits."""
    layers, hidden = c.num_layers, c.hidden_size
    depth = c.get("scale_depth")
    scale = 1.0 if depth is None else depth / math.sqrt(layers)
    layer = pre_norm_layer(latent_attention(c, interleaved=False), dense_mlp(c), rms(c), scale)
    head = HeadFacts(
        norm=rms(c), tied=bool(c.get("tie_word_embeddings")), scale=(c.get("dim_model_base") or hidden) / hidden
    )
    return model(c, [layer] * layers, embedding=EmbeddingFacts(float(c.get("scale_emb"))), head=head)


_COMMON: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
_V3 = _COMMON | {"rope_interleave": True, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
                 "routed_scaling_factor": 2.5}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(
        deepseek(all_latent(True), softmax_router), _COMMON | {"topk_method": "greedy", "routed_scaling_factor": 1.0}
    ),
    "deepseek_v3": Family(
        # the last checkpoint layers predict further tokens and are not part of the decoder
        deepseek(all_latent("rope_interleave"), best_of_groups), _V3, ignored=(r"^model\.layers\.61\.",)
    ),
    "glm4_moe_lite": Family(
        deepseek(all_latent("rope_interleave"), best_of_groups),
        _V3 | {"rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8},
        ignored=(r"^model\.layers\.47\.",),
    ),
    "deepseek_v32": Family(
        deepseek(all_indexed(False), best_of_groups), _V3 | {"index_topk": 2048}, ignored=(r"^model\.layers\.61\.",)
    ),
    "glm_moe_dsa": Family(
        deepseek(all_indexed(True), best_of_groups),
        _V3 | {"rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1, "index_topk": 2048},
        ignored=(r"^model\.layers\.78\.",),
    ),
    "minicpm3": Family(
        minicpm3,
        _COMMON
        | {
            "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "scale_emb": 12, "scale_depth": 1.4,
            "dim_model_base": 256,
        },
    ),
}  # fmt: skip
