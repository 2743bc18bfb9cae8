"""DeepSeek-V4: windows, compressed entries and an indexer over them, on several residual streams.

Source: transformers 5.24.0, models/deepseek_v4/configuration_deepseek_v4.py and modeling_deepseek_v4.py.
"""

from __future__ import annotations

from typing import Any

from kvlab.models.facts import MLPFacts, ModelConfig, NormFacts, RopeFacts
from kvlab.models.families.common import Family, model, rms
from kvlab.models.families.reader import ConfigReader
from kvlab.models.modules.compressed import CompressedAttentionFacts, EntryIndexFacts
from kvlab.models.modules.compressor import CompressorFacts
from kvlab.models.modules.hash_moe import HashMoEFacts
from kvlab.models.modules.hyper import HyperFacts, HyperLayerFacts
from kvlab.models.modules.moe import MoEFacts
from kvlab.models.modules.router import RouterFacts
from kvlab.specs.families import from_config


def rotary_dim(c: ConfigReader) -> int:
    """Values of a head that rotate, the last ones."""
    share = c.get("partial_rotary_factor")
    return int(c.positive("head_dim") * share) if share else c.positive("qk_rope_head_dim")


def rotations(c: ConfigReader) -> tuple[RopeFacts, RopeFacts]:
    """(rule of layers with a window alone, rule of layers that compress): stretched are only the second.

    Where positions are stretched, cosines and sines keep their length unless the file says otherwise.
    """
    rule = c.get("rope_parameters") or c.get("rope_scaling") or {}
    if "main" in rule and "compress" in rule:
        main, compress = rule["main"], rule["compress"]
    else:
        main = {"rope_theta": c.get("rope_theta")}
        compress = dict(rule) | {"rope_theta": c.get("compress_rope_theta")}
        if compress.get("rope_type", compress.get("type")) == "yarn":
            compress = {"attention_factor": 1.0} | compress
    dim = rotary_dim(c)
    found = [
        ConfigReader({**c.config, "rope_scaling": None, "rope_parameters": part}, DEFAULTS).rope(
            dim=dim, interleaved=True
        )
        for part in (main, compress)
    ]
    return found[0], found[1]


def attentions(c: ConfigReader) -> list[CompressedAttentionFacts]:
    """The attention of each layer; which entries it has is read from what the layer caches."""
    main, compress = rotations(c)
    dim, rotary, norm = c.positive("head_dim"), rotary_dim(c), rms(c)

    def compressor(ratio: int, width: int, overlap: bool) -> CompressorFacts:
        return CompressorFacts(ratio, width, rotary, overlap, compress, norm)

    found = []
    for layer in from_config(c.config).layers:
        ratios = [part.ratio for part in layer.parts if part.kind == "compressed"]
        chosen = any(part.kind == "index" for part in layer.parts)
        index = None
        if chosen:
            inner = compressor(ratios[0], c.positive("index_head_dim"), True)
            index = EntryIndexFacts(inner, c.positive("index_n_heads"), c.positive("index_topk"))
        found.append(
            CompressedAttentionFacts(
                c.positive("num_attention_heads"),
                dim,
                rotary,
                c.positive("q_lora_rank"),
                window=c.positive("sliding_window"),
                scale=dim**-0.5,
                rope=compress if ratios else main,
                norm=norm,
                out_groups=c.positive("o_groups"),
                out_rank=c.positive("o_lora_rank"),
                compressor=compressor(ratios[0], dim, chosen) if ratios else None,
                index=index,
            )
        )
    return found


def feed_forwards(c: ConfigReader) -> list[Any]:
    """Experts in every layer; in the first ones a table names them by token id."""
    width, limit = c.positive("moe_intermediate_size"), float(c.get("swiglu_limit"))
    router = RouterFacts(
        c.positive("n_routed_experts"),
        c.positive("num_experts_per_tok"),
        score=c.get("scoring_func"),
        correction=True,
        normalise=True,
        floor=1e-20,
        scale=float(c.get("routed_scaling_factor")),
    )
    shared = MLPFacts(width, c.activation(), bias=c.flag("mlp_bias"), prefix="shared_experts", limit=limit)
    experts = MoEFacts(router, width, c.activation(), limit=limit, shared=shared)
    kinds = c.get("mlp_layer_types")
    if kinds is None:
        kinds = ["hash_moe" if i < c.get("num_hash_layers") else "moe" for i in range(c.num_layers)]
    table = HashMoEFacts(experts, c.positive("vocab_size"), c.positive("num_experts_per_tok"))
    return [table if kind == "hash_moe" else experts for kind in c.per_layer("mlp_layer_types", tuple(kinds))]


def deepseek_v4(c: ConfigReader) -> ModelConfig:
    """Every layer: attention and experts between hyper-connections."""
    eps = float(c.get("rms_norm_eps"))
    hyper = HyperFacts(c.positive("hc_mult"), c.positive("hc_sinkhorn_iters"), float(c.get("hc_eps")), eps)
    pairs = zip(attentions(c), feed_forwards(c), strict=True)
    layers = [HyperLayerFacts(mixer, experts, NormFacts(eps=eps), hyper) for mixer, experts in pairs]
    return model(c, layers, extra=hyper)


DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "compress_rope_theta": 160_000.0,
    "tie_word_embeddings": False, "mlp_bias": False, "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0, "num_hash_layers": 3, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "index_topk": 512, "index_n_heads": 64, "index_head_dim": 128, "o_groups": 8, "o_lora_rank": 1024,
    "sliding_window": 128, "qk_rope_head_dim": 64,
}  # fmt: skip

FAMILIES = {"deepseek_v4": Family(deepseek_v4, DEFAULTS, ignored=(r"(^|\.)mtp\.",))}
