"""Mamba and Mamba-2, alone and in hybrids: few heads, channels and values of state, all of different number."""

from __future__ import annotations

from typing import Any

from kvlab.lab.parity.small import dense, moe
from kvlab.lab.parity.small.row import HEAD_DIM, VOCAB, WINDOW, Changes, Small
from kvlab.models.facts import AttentionFacts, LayerFacts, ModelConfig
from kvlab.models.modules.mamba2 import Mamba2Facts
from kvlab.models.modules.shared_block import HybridLayerFacts
from kvlab.specs.families.recurrent import hybrid_pattern

HIDDEN, STATE, RANK, WIDTH = 48, 12, 5, 8
SHORTEST_STEP = 0.4
CHUNK = 8  # tokens that transformers' own scan takes at once

# what each family calls heads, their width, groups, state size and chunk of its Mamba-2 mixers
_USUAL = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_chunk_size")
FIELDS = {
    "mamba2": ("num_heads", "head_dim", "n_groups", "state_size", "chunk_size"),
    "bamba": _USUAL,
    "granitemoehybrid": _USUAL,
    "falcon_h1": _USUAL,
    "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "chunk_size"),
    "kvlab_hybrid": _USUAL,
    "zamba2": ("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "chunk_size"),
}


def mamba2(config: dict[str, Any], facts: ModelConfig, inner: int) -> Changes:
    """Heads that make up `inner`, in at most two groups."""
    every = [b.module for x in facts.layers if isinstance(x, LayerFacts) for b in x.branches]
    groups = next(m for m in every if isinstance(m, Mamba2Facts)).num_groups
    values = (inner // WIDTH, WIDTH, min(groups, 2), STATE, CHUNK)
    return dict(zip(FIELDS[config["model_type"]], values, strict=True))


def mixers(facts: ModelConfig, kept: tuple[int, ...]) -> list[str]:
    """transformers' name for the mixer of each kept layer."""
    kinds = [facts.layers[i].branches[0].module for i in kept]
    return ["full_attention" if isinstance(m, AttentionFacts) else "linear_attention" for m in kinds]


def depth(config: dict[str, Any], facts: ModelConfig, kept: tuple[int, ...]) -> Changes:
    """The number of layers: all that sets them apart is a period that the kept ones begin with."""
    return {"num_hidden_layers": len(kept)}


def _pure(config: dict[str, Any], facts: ModelConfig) -> Changes:
    """Models without attention, of either generation."""
    new: Changes = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "intermediate_size": 2 * HIDDEN}
    if config["model_type"] == "mamba2":
        return new | mamba2(config, facts, 2 * HIDDEN)
    return new | {"state_size": STATE, "time_step_rank": RANK}


def _jamba(config: dict[str, Any], facts: ModelConfig) -> Changes:
    experts = moe.experts(config) if config.get("num_experts", 16) > 1 else {}
    return dense.widths(config, facts) | experts | {"mamba_d_state": STATE, "mamba_dt_rank": RANK}


def _hybrid(config: dict[str, Any], facts: ModelConfig) -> Changes:
    """Attention as Llama's, and Mamba-2 heads."""
    new = dense.widths(config, facts)
    return new | mamba2(config, facts, config.get("mamba_expand", 2) * new["hidden_size"])


def _bamba_layers(config: dict[str, Any], facts: ModelConfig, kept: tuple[int, ...]) -> Changes:
    kinds = mixers(facts, kept)
    return {"num_hidden_layers": len(kept), "attn_layer_indices": [i for i, k in enumerate(kinds) if k[0] == "f"]}


def _granite(config: dict[str, Any], facts: ModelConfig) -> Changes:
    return _hybrid(config, facts) | moe.experts(config) | {"shared_intermediate_size": 20}


def _listed_layers(config: dict[str, Any], facts: ModelConfig, kept: tuple[int, ...]) -> Changes:
    return {"num_hidden_layers": len(kept), "layer_types": mixers(facts, kept)}


def _falcon_h1(config: dict[str, Any], facts: ModelConfig) -> Changes:
    inner = 6 * WIDTH
    return dense.widths(config, facts) | {"mamba_d_ssm": inner} | mamba2(config, facts, inner)


def _nemotron(config: dict[str, Any], facts: ModelConfig) -> Changes:
    """The shortest step so long that it binds."""
    new = dense.widths(config, facts) | moe.experts(config) | mamba2(config, facts, 6 * WIDTH)
    new |= {"moe_latent_size": 10} if config.get("moe_latent_size") else {}
    return new | {"time_step_min": SHORTEST_STEP, "num_nextn_predict_layers": 0}


def _nemotron_layers(config: dict[str, Any], facts: ModelConfig, kept: tuple[int, ...]) -> Changes:
    name = "layers_block_type" if config.get("layers_block_type") else "hybrid_override_pattern"
    parts = [config[name][i] for i in kept]
    return {"num_hidden_layers": len(kept), name: "".join(parts) if isinstance(config[name], str) else parts}


def _zamba2(config: dict[str, Any], facts: ModelConfig) -> Changes:
    """Under the names of transformers' class, which knows no others."""
    new: Changes = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": VOCAB}
    adapters = facts.extra.blocks[0].attention_adapters
    new |= {"intermediate_size": 56, "adapter_rank": RANK, "use_shared_attention_adapter": adapters}
    new |= {
        "kv_channels": HIDDEN // 4,
        "time_step_min": SHORTEST_STEP,
        "use_mem_rope": bool(config.get("use_mem_rope")),
    }
    return new | mamba2(config, facts, 2 * HIDDEN) | {"mamba_expand": 2, "state_size": STATE}


def _zamba2_kinds(config: dict[str, Any], facts: ModelConfig) -> list[str]:
    """Up to the first layer that uses a shared block for the second time what each is; the rest repeats it."""
    kinds = ["hybrid" if isinstance(layer, HybridLayerFacts) else "linear_attention" for layer in facts.layers]
    uses = [i for i, kind in enumerate(kinds) if kind == "hybrid"]
    again = (*uses, *[len(kinds)] * 2)[len(facts.extra.blocks)]
    # uses are told apart, or a period would leave the second use of a block out
    named = [f"{kind} {i}" if kind == "hybrid" else kind for i, kind in enumerate(kinds)]
    return [kind if i <= again else "rest" for i, kind in enumerate(named)]


def _zamba2_layers(config: dict[str, Any], facts: ModelConfig, kept: tuple[int, ...]) -> Changes:
    kinds = ["hybrid" if isinstance(facts.layers[i], HybridLayerFacts) else "linear_attention" for i in kept]
    return {"num_hidden_layers": len(kept), "layers_block_type": kinds}


def _native_hybrid(config: dict[str, Any], facts: ModelConfig) -> Changes:
    """Whatever its layers are, every size that one of them may read."""
    hidden = 3 * HEAD_DIM
    new: Changes = {"hidden_size": hidden, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": HEAD_DIM}
    new |= {"intermediate_size": 56, "vocab_size": VOCAB, "sliding_window": WINDOW}
    values = (2 * hidden // WIDTH, WIDTH, 2, STATE, CHUNK)
    new |= dict(zip(FIELDS["kvlab_hybrid"], values, strict=True)) | {"mamba_expand": 2}
    sizes = zip(("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"), (2, 4, 12, 20), strict=True)
    return new | {f"linear_{name}": value for name, value in sizes}


def _native_layers(config: dict[str, Any], facts: ModelConfig, kept: tuple[int, ...]) -> Changes:
    kinds = config.get("layer_types") or hybrid_pattern(facts.num_layers, config)
    return {"num_hidden_layers": len(kept), "layer_types": [kinds[i] for i in kept]}


def _hymba(config: dict[str, Any], facts: ModelConfig) -> Changes:
    meta = {"num_meta_tokens": min(config.get("num_meta_tokens", 0), 5)}
    return dense.widths(config, facts) | meta | {"mamba_d_state": STATE, "mamba_dt_rank": RANK}


SMALL = {
    "kvlab_hybrid": Small(_native_hybrid, _native_layers),
    "kvlab_hymba": Small(_hymba, depth),
    **{name: Small(_pure, depth) for name in ("mamba", "mamba2", "falcon_mamba")},
    "jamba": Small(_jamba, depth),
    "bamba": Small(_hybrid, _bamba_layers),
    "granitemoehybrid": Small(_granite, _listed_layers),
    "falcon_h1": Small(_falcon_h1, depth),
    "nemotron_h": Small(_nemotron, _nemotron_layers),
    "zamba2": Small(_zamba2, _zamba2_layers, _zamba2_kinds),
}
