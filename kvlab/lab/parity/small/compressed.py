"""DeepSeek-V4 made small: ratios, window and top-k at which several windows close within the tested tokens."""

from __future__ import annotations

from typing import Any

from kvlab.lab.parity.small.dense import small_rotary
from kvlab.lab.parity.small.row import TESTED_TOKENS, VOCAB, WINDOW, Changes, Small
from kvlab.models.facts import ModelConfig
from kvlab.models.modules.compressed import CompressedAttentionFacts

ROTARY, DIM = 12, 20
KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
RATES = {KINDS[1]: 4, KINDS[2]: 6}


def attentions(facts: ModelConfig) -> list[CompressedAttentionFacts]:
    """The attention of each layer."""
    return [layer.mixer for layer in facts.layers]


def widths(config: dict[str, Any], facts: ModelConfig) -> Changes:
    """Few heads, experts and streams; limits and floors where they bind."""
    new: Changes = {
        "hidden_size": 44,
        "num_attention_heads": 4,
        "head_dim": DIM,
        "qk_rope_head_dim": ROTARY,
        "partial_rotary_factor": ROTARY / DIM,
        "q_lora_rank": 18,
        "o_groups": 2,
        "o_lora_rank": 10,
        "moe_intermediate_size": 18,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2 * TESTED_TOKENS,
        "sliding_window": WINDOW,
        # all of an indexer's few heads may be silent for a key; of 32 one always speaks, so no scores are equal
        "index_n_heads": 32,
        "index_head_dim": ROTARY + 4,
        "index_topk": 3,
        "compress_rates": RATES,
        "swiglu_limit": 0.7,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 2,
        "hc_eps": 0.01,
    }
    rope = next((a.rope for a in attentions(facts) if a.compressor), None)
    return new | small_rotary(config, rope, ROTARY)


def layers(config: dict[str, Any], facts: ModelConfig, kept: tuple[int, ...]) -> Changes:
    """The kept layers by the types that transformers names them with."""
    every = attentions(facts)
    names = [KINDS[0] if not a.compressor else KINDS[1] if a.index else KINDS[2] for a in every]
    hashed = [type(layer.feed_forward).__name__ == "HashMoEFacts" for layer in facts.layers]
    return {
        "num_hidden_layers": len(kept),
        "layer_types": [names[i] for i in kept],
        "compress_ratios": None,
        "mlp_layer_types": ["hash_moe" if hashed[i] else "moe" for i in kept],
        "num_hash_layers": None,
    }


SMALL = {"deepseek_v4": Small(widths, layers)}
