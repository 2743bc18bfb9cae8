"""What the explorer shows for a set of controls: `explorer_state`, JSON in, JSON out.

The same function answers in a notebook's kernel and in the published page. It holds no formula: a preset or an own
shape becomes a config, `make_plan` does the rest, and `command` is the line that prints the same figures.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from kvlab.plan.output import assumptions, timing
from kvlab.plan.plan import Plan, bytes_per_token_at, make_plan

OWN = "own"
DEFAULTS: dict[str, Any] = {
    "model": "llama-3.1-8b", "attention": "gqa", "layers": 32, "query_heads": 32, "kv_heads": 8, "head_dim": 128,
    "window": 4096, "full_every": 4, "latent_dim": 512, "rope_dim": 64, "state_dim": 128, "ratio": 128,
    "weight_dtype": "bf16", "kv_dtype": "bf16", "context": 8192, "batch": 1, "gpu": "h100-sxm", "tp": 1, "policy": "ideal",
}  # fmt: skip
ATTENTION = ("mha", "gqa", "mqa", "mla", "sliding", "hybrid", "recurrent", "compressed")
RATIOS = (4, 128)
"""Tokens per compressed entry: DeepSeek-V4's two kinds of layer, the denser with an indexer."""
_OPTIONS = ("context", "batch", "kv_dtype", "weight_dtype", "tp", "gpu", "policy")
_BOUND = {"weights": "reading the weights", "cache": "reading the cache", "compute": "arithmetic"}
FFN_PER_HIDDEN = 3.5
VOCABULARY = 128_256
LIMITS = {
    "layers": 1000, "query_heads": 4096, "kv_heads": 4096, "head_dim": 4096, "window": 2**30, "full_every": 1000,
    "latent_dim": 2**16, "rope_dim": 4096, "state_dim": 4096, "ratio": 128,
}  # fmt: skip


def explorer_state(params: Mapping[str, Any]) -> dict[str, Any]:
    """What the explorer shows; sizes are exact bytes and of one GPU where `memory` holds them.

    `params` are the controls by name (missing ones as in DEFAULTS): a preset, or "own" with the shape's fields.
    The state holds `params` (filled in), `name`, `gpu`, `memory` (capacity and what fills it), `max_concurrent`,
    `fits`, `decode` (tokens per second and what bounds them), bytes per sequence and token, `command`, `config`
    (of an own shape) and `notes`.

    Raises:
        ValueError: names the control, its value and the rule it breaks.
    """
    if unknown := sorted(set(params) - set(DEFAULTS)):
        raise ValueError(f"control {unknown[0]!r}: must be one of {', '.join(DEFAULTS)}")
    p = {**DEFAULTS, **params}
    config = own_config(p) if p["model"] == OWN else None
    options = {name: p[name] for name in _OPTIONS}
    plan = make_plan(config or p["model"], **options)
    step = timing(plan)["decode"]
    return {
        "params": p,
        "name": "own shape" if config else plan.model.name,
        "gpu": plan.options.hardware.name,
        "memory": _memory(plan),
        "max_concurrent": plan.max_concurrent(),
        "fits": plan.max_concurrent() >= plan.options.batch,
        "longest_context": plan.longest_context,
        "decode": {**step, "bound": _BOUND[step["bound_by"]]},
        "kv_bytes": plan.sequence().total,
        "kv_bytes_per_gpu": plan.per_gpu().total,
        "kv_bytes_per_token_at_context": bytes_per_token_at(plan.model, plan.context),
        "kv_state_bytes": plan.model.state_bytes,
        "weights_bytes": plan.weights_bytes,
        "config": config,
        "command": command(p, config),
        "notes": [*_shape_notes(config), *assumptions(plan)],
    }


def _memory(plan: Plan) -> dict[str, int]:
    """What fills one GPU, the fullest, with the whole batch: the parts add up to `used_bytes`.

    `overhead_bytes` is what no one else may use: the part of the memory left out by gpu_util, the workspace, and the
    pool's own pages.
    """
    budget, one, batch = plan.memory, plan.per_gpu(), plan.options.batch
    state = max(stage.state_bytes for stage in plan.stages)
    found = {
        "weights_bytes": budget.weights_bytes,
        "cache_bytes": batch * (one.total - state),
        "state_bytes": batch * state,
        "overhead_bytes": budget.memory_bytes - budget.usable_bytes + budget.reserve_bytes + one.pool_overhead,
    }
    used = sum(found.values())
    return {
        "capacity_bytes": budget.memory_bytes,
        **found,
        "used_bytes": used,
        "free_bytes": budget.memory_bytes - used,
    }


def command(params: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> str:
    """The `kvlab plan` line that prints the same figures; an own shape's config is its TARGET."""
    target = params["model"] if config is None else json.dumps(config)
    words = ["kvlab", "plan", shlex.quote(target)]
    for name in _OPTIONS:
        if name in ("context", "batch", "gpu") or params[name] != DEFAULTS[name]:
            words += ["--" + name.replace("_", "-"), shlex.quote(str(params[name]))]
    return " ".join(words)


def own_config(params: Mapping[str, Any]) -> dict[str, Any]:
    """The config of an own shape: a decoder with gated feed-forward layers, as `kvlab.specs` and the engine read it.

    Hidden size is query heads x head_dim, the feed-forward width 3.5 times that, the vocabulary 128,256 (as in
    Llama 3), tables not tied. "recurrent" is attention in one layer of `full_every` and a gated delta net between,
    whose state is a `state_dim` x `state_dim` matrix per query head (Qwen3.5's layers); "compressed" a window and one
    entry per `ratio` tokens in every layer (DeepSeek-V4's layers, its feed-forward part in two halves).

    Raises:
        ValueError: a control that is no whole number in its range, an unknown kind, heads that do not divide.
    """
    p = {**DEFAULTS, **params}
    attention = str(p["attention"])
    if attention not in ATTENTION:
        raise ValueError(f"attention {attention!r}: must be one of {', '.join(ATTENTION)}")
    shape = {name: _number(name, p[name]) for name in LIMITS}
    heads, hidden = shape["query_heads"], shape["query_heads"] * shape["head_dim"]
    kv_heads = {"mha": heads, "mqa": 1, "mla": heads}.get(attention, shape["kv_heads"])
    if heads % kv_heads:
        raise ValueError(f"kv_heads {kv_heads}: must divide the {heads} query heads")
    config = {
        "model_type": "llama", "num_hidden_layers": shape["layers"], "hidden_size": hidden,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": shape["head_dim"],
        "intermediate_size": int(FFN_PER_HIDDEN * hidden), "vocab_size": VOCABULARY,
        "max_position_embeddings": 2**20, "tie_word_embeddings": False,
    }  # fmt: skip
    if attention == "mla":
        return _latent(config, shape)
    if attention == "recurrent":
        return _recurrent(config, shape)
    if attention == "compressed":
        return _compressed(config, shape)
    if attention in ("sliding", "hybrid"):
        return _windowed(config, shape, attention)
    return config


def _windowed(config: dict[str, Any], shape: Mapping[str, int], attention: str) -> dict[str, Any]:
    window = {"sliding_window": shape["window"]}
    if attention == "sliding":
        return {**config, **window, "model_type": "mistral"}
    every = shape["full_every"]
    kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(shape["layers"])]
    return {**config, **window, "model_type": "qwen3", "use_sliding_window": True, "layer_types": kinds}


def _recurrent(config: dict[str, Any], shape: Mapping[str, int]) -> dict[str, Any]:
    heads, width = config["num_attention_heads"], shape["state_dim"]
    return {
        **config, "model_type": "qwen3_5_text", "full_attention_interval": shape["full_every"],
        "linear_num_key_heads": heads, "linear_num_value_heads": heads, "linear_key_head_dim": width,
        "linear_value_head_dim": width, "linear_conv_kernel_dim": 4,
    }  # fmt: skip


def _compressed(config: dict[str, Any], shape: Mapping[str, int]) -> dict[str, Any]:
    if shape["ratio"] not in RATIOS:
        raise ValueError(f"ratio {shape['ratio']}: must be one of {', '.join(map(str, RATIOS))} tokens per entry")
    width = config["head_dim"]
    return {
        **config, "model_type": "deepseek_v4", "num_key_value_heads": 1, "sliding_window": shape["window"],
        "compress_ratios": [shape["ratio"]] * shape["layers"], "index_head_dim": width, "index_n_heads": 32,
        "index_topk": 1024, "q_lora_rank": config["hidden_size"] // 4, "qk_rope_head_dim": width // 2,
        "o_groups": 1, "o_lora_rank": config["hidden_size"] // 4, "hc_mult": 4, "num_hash_layers": 0,
        "moe_intermediate_size": config["intermediate_size"] // 2, "n_routed_experts": 1, "n_shared_experts": 1,
        "num_experts_per_tok": 1,
    }  # fmt: skip


def _latent(config: dict[str, Any], shape: Mapping[str, int]) -> dict[str, Any]:
    del config["head_dim"]
    return {
        **config, "model_type": "minicpm3", "kv_lora_rank": shape["latent_dim"], "q_lora_rank": 3 * shape["latent_dim"],
        "qk_rope_head_dim": shape["rope_dim"], "qk_nope_head_dim": shape["head_dim"], "v_head_dim": shape["head_dim"],
    }  # fmt: skip


def _number(name: str, value: Any) -> int:
    if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        raise ValueError(f"{name} {value!r}: must be a whole number")
    if not 1 <= value <= LIMITS[name]:
        raise ValueError(f"{name} {value!r}: must be at least 1 and at most {LIMITS[name]:,}")
    return int(value)


def _shape_notes(config: Mapping[str, Any] | None) -> list[str]:
    if config is None:
        return []
    return [
        f"own shape: hidden size {config['hidden_size']:,}, feed-forward width {config['intermediate_size']:,}, "
        f"vocabulary {config['vocab_size']:,}, embedding and output tables not tied"
    ]
