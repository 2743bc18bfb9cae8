"""Windows and chunks: short ones, soft-caps that bind, temperatures that rise within the tested tokens."""

from __future__ import annotations

from typing import Any

from kvlab.lab.parity.small import dense, moe
from kvlab.lab.parity.small.row import HEAD_DIM, Changes, Small
from kvlab.models.facts import ModelConfig

CHUNK = 9
WIDE_HEAD = 64
# field -> its small value, where the config (or its class) has one
BINDING = {
    "attn_logit_softcapping": 9.0,
    "swiglu_limit": 0.7,
    "attention_chunk_size": CHUNK,
    "floor_scale": 5,
    "intermediate_size_mlp": 2 * HEAD_DIM + 4,
}


def widths(config: dict[str, Any], facts: ModelConfig) -> Changes:
    """As Llama's, the experts, and every limit where it binds."""
    new = moe.widths(config, facts) | {name: small for name, small in BINDING.items() if config.get(name)}
    new |= {"final_logit_softcapping": 0.4} if facts.head.softcap else {}
    found = dense.attentions(facts)
    binds = {"floor_scale": any(a.temperature for a in found), "attn_logit_softcapping": any(a.softcap for a in found)}
    binds["attention_chunk_size"] = any(a.chunk for a in found)
    binds["swiglu_limit"] = any(getattr(b.module, "limit", 0) for b in facts.layers[0].branches)
    new |= {name: BINDING[name] for name, used in binds.items() if used}
    bare = next((a for a in found if a.qk_norm and not a.qk_norm.weight), None)
    if bare is not None:
        # between directions alone scores are at most the root of the width, which must be enough to choose
        new |= {"head_dim": WIDE_HEAD} | dense.small_rotary(config, bare.rope, WIDE_HEAD)
    # scores are divided by the root of this, whatever the width of a head
    return new | ({"query_pre_attn_scalar": 20} if facts.model_type.startswith("gemma") else {})


def layers(config: dict[str, Any], facts: ModelConfig, kept: tuple[int, ...]) -> Changes:
    """As Llama's, and what each kept layer is: chunked, rotated, with experts."""
    new = dense.layers(config, facts, kept)
    every = dense.attentions(facts)
    if any(a.chunk for a in every):
        new |= {
            "layer_types": ["chunked_attention" if every[i].chunk else "full_attention" for i in kept],
            "no_rope_layers": [int(every[i].rope is not None) for i in kept],
            "moe_layers": [k for k, i in enumerate(kept) if hasattr(facts.layers[i].branches[1].module, "router")],
        }
    return new


SMALL = {
    name: Small(widths, layers) for name in ("gemma2", "gemma3", "olmo3", "cohere", "cohere2", "gpt_oss", "llama4")
}
