"""One module per mechanism: `MODULES` says which class runs which facts, and which plain function is its truth."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvlab.models.facts import AttentionFacts, MLPFacts
from kvlab.models.modules import (
    attention,
    compressed,
    gated_delta,
    gemma3n,
    hash_moe,
    hyper,
    indexed_mla,
    kda,
    linear_attention,
    mamba1,
    mamba2,
    mla,
    mlp,
    moe,
    normed_layer,
    rwkv,
    shared_block,
    short_conv,
)
from kvlab.models.modules.base import Place, WholeContext
from kvlab.models.weights import Names, Scope

# facts class -> (module class, plain forward without a cache)
MODULES: dict[type, tuple[Any, Any]] = {
    AttentionFacts: (attention.Attention, attention.reference),
    MLPFacts: (mlp.MLP, mlp.reference),
    moe.MoEFacts: (moe.MoE, moe.reference),
    mla.LatentAttentionFacts: (mla.LatentAttention, mla.reference),
    indexed_mla.IndexedAttentionFacts: (indexed_mla.IndexedAttention, indexed_mla.reference),
    indexed_mla.ReusedIndexFacts: (indexed_mla.ReusedIndexAttention, indexed_mla.reference_reused),
    compressed.CompressedAttentionFacts: (compressed.CompressedAttention, compressed.reference),
    hash_moe.HashMoEFacts: (hash_moe.HashMoE, hash_moe.reference),
    gated_delta.GatedDeltaFacts: (gated_delta.GatedDelta, gated_delta.reference),
    kda.KDAFacts: (kda.KDA, kda.reference),
    linear_attention.LinearAttentionFacts: (linear_attention.LinearAttention, linear_attention.reference),
    short_conv.ShortConvFacts: (short_conv.ShortConv, short_conv.reference),
    mamba1.Mamba1Facts: (mamba1.Mamba1, mamba1.reference),
    mamba2.Mamba2Facts: (mamba2.Mamba2, mamba2.reference),
}
# facts class of a layer with a mechanism of its own -> (layer class, plain forward)
LAYERS: dict[type, tuple[Any, Any]] = {
    gemma3n.AltUpFacts: (gemma3n.AltUp, gemma3n.ReferenceAltUp),
    gemma3n.AltUpLayerFacts: (gemma3n.AltUpLayer, gemma3n.layer_reference),
    hyper.HyperFacts: (hyper.Streams, hyper.ReferenceStreams),
    hyper.HyperLayerFacts: (hyper.HyperLayer, hyper.reference),
    rwkv.RwkvLayerFacts: (rwkv.RwkvLayer, rwkv.layer_reference),
    normed_layer.NormedLayerFacts: (normed_layer.NormedLayer, normed_layer.layer_reference),
    shared_block.SharedBlocksFacts: (shared_block.SharedBlocks, shared_block.ReferenceBlocks),
    shared_block.HybridLayerFacts: (shared_block.HybridLayer, shared_block.layer_reference),
}


def build(facts: Any, source: Scope, hidden: int, place: Place) -> Any:
    """The module that runs `facts`: called with ([T, hidden], StepContext) it returns [T, hidden]."""
    return MODULES[type(facts)][0](facts, source, hidden, place)


def num_parts(facts: Any) -> int:
    """How many parts of a layer's cache the module of `facts` has."""
    return MODULES[type(facts)][0].num_parts


def reference(facts: Any, weights: Names, x: Tensor, whole: WholeContext) -> Tensor:
    """The module of `facts` in plain torch over a whole sequence [T, hidden], without a cache."""
    return MODULES[type(facts)][1](facts, weights, x, whole)
