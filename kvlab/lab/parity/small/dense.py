"""Grouped-query attention and what surrounds it, under Llama's field names."""

from __future__ import annotations

import math
from typing import Any

from kvlab.lab.parity.small.row import HEAD_DIM, TESTED_TOKENS, VOCAB, WINDOW, Changes, Small
from kvlab.models.facts import AttentionFacts, ModelConfig, RopeFacts


def attentions(facts: ModelConfig) -> list[AttentionFacts]:
    """The attention of each layer that has one."""
    return [b.module for layer in facts.layers for b in layer.branches if isinstance(b.module, AttentionFacts)]


def small_heads(attention: AttentionFacts) -> tuple[int, int]:
    """(query heads, KV heads), few, in the ratio of the original."""
    per_kv = attention.num_query_heads // attention.num_kv_heads
    kv_heads = min(attention.num_kv_heads, 2 if per_kv > 1 else 4)
    return kv_heads * per_kv, kv_heads


def widths(config: dict[str, Any], facts: ModelConfig) -> Changes:
    """Heads in their ratio, a small head_dim, and a hidden size that is heads * head_dim only where it was."""
    attention = attentions(facts)[0]
    heads, kv_heads = small_heads(attention)
    explicit = attention.key_dim * attention.num_query_heads != facts.hidden_size
    hidden = heads * (HEAD_DIM - 6 if explicit else HEAD_DIM)
    new = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": hidden + 2 * HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2 * TESTED_TOKENS,
    }
    # a stated factor on scores belongs to the head's width
    new |= {name: value for name, value in SCALES.items() if config.get(name)}
    ropes = [a.rope for a in attentions(facts) if a.rope]
    rotary = small_rotary(config, next((rope for rope in ropes if rope.kind in SCALED), None))
    return new | rotary | ({"head_dim": HEAD_DIM} if explicit or config.get("head_dim") else {})


def layers(config: dict[str, Any], facts: ModelConfig, kept: tuple[int, ...]) -> Changes:
    """The kept layers' share of every per-layer fact, written out in full."""
    every = attentions(facts)
    new: Changes = {"num_hidden_layers": len(kept)}
    if any(a.window for a in every):
        new["sliding_window"] = WINDOW
    if config.get("layer_types") or len({a.window for a in every}) > 1:
        new["layer_types"] = ["sliding_attention" if every[i].window else "full_attention" for i in kept]
    if "max_window_layers" in config:
        new["max_window_layers"] = sum(every[i].window == 0 for i in kept)
    if any(a.rope is None for a in every):
        new["no_rope_layers"] = [int(every[i].rope is not None) for i in kept]
    return new


def small_rotary(config: dict[str, Any], rope: RopeFacts | None, head_dim: int = HEAD_DIM) -> Changes:
    """The length that a rotary scaling refers to, moved so that each of its bands holds a frequency."""
    if rope is None or rope.kind not in SCALED:
        return {}
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    dim = head_dim if not rope.dim else int(head_dim * _rotated_share(config))
    rule = config[name]
    # of layers with rules of their own the full ones are stretched
    section = rule.get("full_attention", rule)
    small = section | SCALED[rope.kind](section, rope, dim)
    new = {name: rule | {"full_attention": small} if section is not rule else small}
    if config.get("original_max_position_embeddings"):
        new["original_max_position_embeddings"] = small["original_max_position_embeddings"]
    return new


def _rotated_share(config: dict[str, Any]) -> float:
    rule = config.get("rope_parameters") or {}
    return rule.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0


def _llama3(rule: Changes, rope: RopeFacts, dim: int) -> Changes:
    # the second wavelength is blended, shorter ones are kept and longer ones stretched
    wavelength = 2 * math.pi * rope.theta ** (2 / dim)
    middle = wavelength * math.sqrt(rope.low_freq_factor * rope.high_freq_factor)
    # without a band to blend in (Llama 4) it is kept, and only just
    bandless = rope.low_freq_factor == rope.high_freq_factor
    return {"original_max_position_embeddings": math.ceil(middle) if bandless else round(middle)}


def _yarn(rule: Changes, rope: RopeFacts, dim: int) -> Changes:
    # the ramp begins between the second pair and the third
    if rule.get("llama_4_scaling_beta"):
        # the length is also the step by which queries grow, which must lie within the tested tokens
        small = {"beta_fast": BETA, "beta_slow": BETA / 32, "factor": 4.0}
        return small | {"original_max_position_embeddings": round(BETA * 2 * math.pi * rope.theta ** (3 / dim))}
    original = round(rope.beta_fast * 2 * math.pi * rope.theta ** (3 / dim))
    # what is stretched further hardly turns within the tested tokens
    return {"original_max_position_embeddings": original, "factor": min(rope.factor, 4.0)}


def _longrope(rule: Changes, rope: RopeFacts, dim: int) -> Changes:
    # lists of every n-th divisor; shorter than every tested sequence, so that transformers too takes the long ones
    short, long = ([rule[key][i * len(rule[key]) // (dim // 2)] for i in range(dim // 2)] for key in FACTORS)
    return dict(zip(FACTORS, (short, long), strict=True)) | {"original_max_position_embeddings": 4}


SCALES = {"attention_multiplier": 0.2, "query_pre_attn_scalar": 20}
BETA = 0.05
FACTORS = ("short_factor", "long_factor")
SCALED = {"llama3": _llama3, "yarn": _yarn, "longrope": _longrope}

SMALL = {"llama": Small(widths, layers)}
