"""The decoders before Llama, which name their fields in their own ways."""

from __future__ import annotations

from typing import Any

from kvlab.lab.parity.small import dense
from kvlab.lab.parity.small.row import HEAD_DIM, TESTED_TOKENS, VOCAB, Changes, Small
from kvlab.models.facts import ModelConfig
from kvlab.specs.weights.reader import ALIASES

WIDEST_GROUP = 16


def spelled(config: dict[str, Any], new: Changes) -> Changes:
    """`new` under every name that the config itself uses for a field, the usual one where it uses none."""
    out: Changes = {}
    for name, value in new.items():
        used = [key for key in (name, *ALIASES.get(name, ())) if key in config]
        out |= dict.fromkeys(used or [name], value)
    return out


def widths(config: dict[str, Any], facts: ModelConfig) -> Changes:
    """Few heads in their ratio (an odd number of queries for a KV head stays odd), and all widths by the config's names."""
    found = dense.attentions(facts)[0]
    per_kv = found.num_query_heads // found.num_kv_heads
    kv_heads = min(found.num_kv_heads, 4 if per_kv == 1 else 2)
    heads = kv_heads * (per_kv if per_kv <= WIDEST_GROUP else WIDEST_GROUP - 8 - per_kv % 2)
    hidden = heads * HEAD_DIM
    new = spelled(config, {"hidden_size": hidden, "num_attention_heads": heads, "vocab_size": VOCAB})
    stated = {"intermediate_size": hidden + 2 * HEAD_DIM, "max_position_embeddings": 2 * TESTED_TOKENS}
    stated |= {"num_key_value_heads": kv_heads if config.get("new_decoder_architecture") else heads}
    # what the config leaves out follows from its width
    new |= {key: value for key, value in spelled(config, stated).items() if config.get(key) is not None}
    return new | {name: value for name, value in OWN.items() if config.get(name) is not None}


def layers(config: dict[str, Any], facts: ModelConfig, kept: tuple[int, ...]) -> Changes:
    """The number of kept layers; they are all alike."""
    return spelled(config, {"num_hidden_layers": len(kept)})


OWN = {"rotary_dim": HEAD_DIM // 4, "max_seq_len": 2 * TESTED_TOKENS}
SMALL = {name: Small(widths, layers) for name in ("gpt2", "gptj", "gpt_neox", "falcon", "bloom", "mpt")}
