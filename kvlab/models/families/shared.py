"""Layers that own no keys and values: Gemma 3n's tail, and a native family in which every layer shares with neighbours.

Source: transformers 5.24.0, models/gemma3n/configuration_gemma3n.py and modeling_gemma3n.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.models.facts import EmbeddingFacts, HeadFacts, ModelConfig, NormFacts
from kvlab.models.families.common import Family, attention, gated_mlp, model, pre_norm_layer, rms
from kvlab.models.families.dense import COMMON
from kvlab.models.families.reader import ConfigReader
from kvlab.models.families.windows import ropes, windows
from kvlab.models.modules.gemma3n import AltUpFacts, AltUpLayerFacts


def sources(kinds: Sequence[int], shared: int) -> tuple[int | None, ...]:
    """For each layer the one whose keys and values it reads: None for its own, and for the last `shared` layers the
    last layer before them of the same kind (window)."""
    first = max(0, len(kinds) - shared)
    own = {kind: i for i, kind in enumerate(kinds[:first])}
    return tuple(None if i < first else own[kind] for i, kind in enumerate(kinds))


def gemma3n(c: ConfigReader) -> ModelConfig:
    """Gemma 3n's text model."""
    norm, found = rms(c), windows(c, 5)
    full, local = ropes(c, "rope_local_base_freq", 10_000.0)
    streams, width = c.positive("altup_num_inputs"), c.positive("hidden_size_per_layer_input")
    sparse, wide = c.get("activation_sparsity_pattern"), c.get("intermediate_size")
    if sparse is None:
        dense = c.num_layers - (10 if c.num_layers > 10 else 0)
        sparse = [0.95] * (c.num_layers - dense) + [0.0] * dense
    bare = NormFacts(eps=norm.eps, weight=False)
    biased = c.flag("attention_bias")
    layers = [
        AltUpLayerFacts(
            attention(
                c, rope=local if window else full, window=window, scale=1.0, qk_norm=norm, value_norm=bare,
                source=source, qkv_bias=biased, out_bias=biased,
            ),
            norm,
            wide[i] if isinstance(wide, list) else wide,
            streams,
            width,
            c.positive("laurel_rank"),
            c.activation("hidden_activation"),
            float(sparse[i] if isinstance(sparse, list) else sparse),
            bool(c.get("altup_correct_scale")),
        )
        for i, (window, source) in enumerate(zip(found, sources(found, c.get("num_kv_shared_layers")), strict=True))
    ]  # fmt: skip
    return model(
        c,
        layers,
        embedding=EmbeddingFacts(scale=c.hidden_size**0.5),
        head=HeadFacts(norm, bool(c.get("tie_word_embeddings")), softcap=float(c.get("final_logit_softcapping") or 0)),
        extra=AltUpFacts(streams, width, c.positive("vocab_size_per_layer_input"), norm),
    )


def cla(c: ConfigReader) -> ModelConfig:
    """Cross-layer attention: of every `cla_sharing_factor` neighbouring layers the first has keys and values.

    Source: Reducing Transformer Key-Value Cache Size with Cross-Layer Attention (arXiv 2405.12981).
    """
    factor, norm, rope, mlp = c.positive("cla_sharing_factor"), rms(c), c.rope(), gated_mlp(c)
    mixers = [attention(c, rope=rope, source=i - i % factor if i % factor else None) for i in range(c.num_layers)]
    return model(c, [pre_norm_layer(mixer, mlp, norm) for mixer in mixers])


FAMILIES: dict[str, Family] = {
    "kvlab_cla": Family(cla, COMMON | {"cla_sharing_factor": 2}),
    "gemma3n": Family(
        gemma3n,
        {
            "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
            "rope_theta": 1_000_000.0, "sliding_window": 512, "tie_word_embeddings": True,
            "final_logit_softcapping": 30.0, "altup_correct_scale": True,
        },
    ),
}  # fmt: skip
