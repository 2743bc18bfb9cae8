"""Layers that differ from their neighbours: which mixer and which feed-forward part stands at which depth."""

from __future__ import annotations

from kvlab.specs.weights import states
from kvlab.specs.weights.blocks import Ffn, Mixer, attention, ffn_width, linear, mla, mlp_size
from kvlab.specs.weights.reader import Reader

_ATTENTION = ("attention", "full_attention", "sliding_attention", 1)


def attention_every(period: int, offset: int = -1) -> list[bool]:
    """One period of a pattern with one attention layer, the last unless `offset`."""
    return [i == offset % period for i in range(period)]


def alternating(state: Mixer, full: Mixer, period: str = "", default: list[bool] | None = None) -> Mixer:
    """`full` where layer_types names attention, `state` elsewhere.

    Args:
        period: field with the distance between attention layers, for files without a list.
        default: the class's own pattern (True: attention), repeated, for files with neither.
    """

    def count(f: Reader, layer: int) -> int:
        types = f.layer_types()
        if types is not None:
            is_attention = types[layer] in _ATTENTION
        else:
            step = f.get(period) if period else None
            pattern = attention_every(step) if step else default or [False]
            is_attention = pattern[layer % len(pattern)]
        return (full if is_attention else state)(f, layer)

    return count


def jamba_mixer(f: Reader, layer: int) -> int:
    """Attention at attn_layer_offset of every attn_layer_period layers, Mamba-1 elsewhere."""
    is_attention = layer % f["attn_layer_period"] == f["attn_layer_offset"]
    return (attention() if is_attention else states.mamba1(inner_norms=True))(f, layer)


def jamba_routes(f: Reader, layer: int) -> bool:
    """Experts at expert_layer_offset of every expert_layer_period layers."""
    return f["num_experts"] > 1 and layer % f["expert_layer_period"] == f["expert_layer_offset"]


def bamba_mixer(f: Reader, layer: int) -> int:
    """Attention in attn_layer_indices, Mamba-2 elsewhere."""
    is_attention = layer in (f.get("attn_layer_indices") or ())
    return (attention("attention_bias") if is_attention else states.mamba2_expanded)(f, layer)


def falcon_h1_mixer(f: Reader, layer: int) -> int:
    """Attention and Mamba-2 side by side in every layer."""
    return attention("attention_bias")(f, layer) + states.mamba2_falcon(f, layer)


def kimi_linear_mixer(f: Reader, layer: int) -> int:
    """KDA, with latent attention in the layers of full_attn_layers (counted from 1)."""
    stated = (f.get("linear_attn_config") or {}).get("full_attn_layers")
    types = f.layer_types()
    if types is not None:
        full = types[layer] == "full_attention"
    else:
        full = layer + 1 in stated if stated is not None else layer > 0 and layer % 4 == 0
    return (mla if full else states.kda)(f, layer)


def lfm2_mixer(f: Reader, layer: int) -> int:
    """Attention where layer_types or full_attn_idxs say, gated short convolutions elsewhere."""
    types, full = f.layer_types(), f.get("full_attn_idxs")
    listed = full is None or layer in full
    is_attention = types[layer] == "full_attention" if types is not None else listed
    return (attention(qk_norm="head") if is_attention else states.short_conv)(f, layer)


def lfm2_ffn(f: Reader, layer: int) -> Ffn:
    """A gated network whose stated width is cut to two thirds and rounded up, unless told not to."""
    width = f["intermediate_size"]
    if f.flag("block_auto_adjust_ff_dim"):
        width = int(f["block_ffn_dim_multiplier"] * int(2 * width / 3))
        width = -(-width // f["block_multiple_of"]) * f["block_multiple_of"]
    return Ffn(mlp_size(f, width))


def recurrent_gemma_mixer(f: Reader, layer: int) -> int:
    """block_types in turn: attention with a biased output, or a gated linear recurrence."""
    kinds = f.get("block_types") or ("recurrent", "recurrent", "attention")
    is_attention = kinds[layer % len(kinds)] == "attention"
    return (attention("attention_bias", out_bias=True) if is_attention else states.rg_lru)(f, layer)


def recurrent_gemma_ffn(f: Reader, layer: int) -> Ffn:
    """A gated network; intermediate_size counts gate and up together."""
    return Ffn(mlp_size(f, f["intermediate_size"] // 2, bias=True))


def llama4_ffn(f: Reader, layer: int) -> Ffn:
    """Experts and one shared expert in moe_layers, a wide dense network elsewhere."""
    step, listed = f.get("interleave_moe_layer_step") or 1, f.get("moe_layers")
    routed = layer in listed if listed is not None else (layer + 1) % step == 0
    if not routed:
        return Ffn(mlp_size(f, f["intermediate_size_mlp"]))
    each, experts = mlp_size(f, f["intermediate_size"]), f["num_experts"]
    return Ffn(linear(f["hidden_size"], experts) + each, each, experts)


def granite_hybrid_ffn(f: Reader, layer: int) -> Ffn:
    """A shared network in every layer, and routed experts beside it when there are any."""
    experts, shared = f.get("num_experts") or 0, mlp_size(f, f["shared_intermediate_size"])
    if not experts:
        return Ffn(shared)
    return Ffn(shared + linear(f["hidden_size"], experts), mlp_size(f, f["intermediate_size"]), experts)


_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NEMOTRON_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}


def nemotron_h_kind(f: Reader, layer: int) -> str:
    """One of mamba, attention, mlp and moe: a layer here is one of them, not a mixer and a feed-forward part."""
    types = f.layer_types()
    if types is None:
        types = [_NEMOTRON_LETTERS.get(letter, letter) for letter in f["hybrid_override_pattern"]]
    return _NEMOTRON_NAMES.get(types[layer], types[layer])


def nemotron_h_mixer(f: Reader, layer: int) -> int:
    """Mamba-2, attention, or nothing."""
    kind = nemotron_h_kind(f, layer)
    return {"mamba": states.mamba2_by_heads, "attention": attention()}.get(kind, lambda f, layer: 0)(f, layer)


def nemotron_h_ffn(f: Reader, layer: int) -> Ffn:
    """An ungated network, or experts that may work on a narrower latent, or nothing."""
    kind, bias = nemotron_h_kind(f, layer), "mlp_bias"
    if kind == "mlp":
        return Ffn(mlp_size(f, ffn_width(f), gated=False, bias=bias))
    if kind != "moe":
        return Ffn(0)
    hidden, experts, latent, width = (
        f["hidden_size"], f["num_experts"], f.get("moe_latent_size"), f["moe_intermediate_size"],
    )  # fmt: skip
    n = linear(hidden, experts) + mlp_size(f, f["moe_shared_expert_intermediate_size"], gated=False, bias=bias)
    if latent:
        n += linear(hidden, latent, f.flag(bias)) + linear(latent, hidden, f.flag(bias))
    return Ffn(n, 2 * linear(latent or hidden, width), experts)


def decilm_mixer(f: Reader, layer: int) -> int:
    """Attention as the search left it: its own number of KV heads, one matrix, or nothing (block_configs)."""
    block, hidden = f["block_configs"][layer]["attention"], f["hidden_size"]
    if block.get("no_op"):
        return 0
    if block.get("replace_with_linear"):
        return linear(hidden, hidden)
    kv = f["num_attention_heads"] // block["n_heads_in_group"] * f.head_dim()
    return 2 * linear(hidden, f["num_attention_heads"] * f.head_dim()) + 2 * linear(hidden, kv)


def decilm_ffn(f: Reader, layer: int) -> Ffn:
    """A gated network of 2/3 ffn_mult times the hidden size, rounded up to 256, one matrix, or nothing."""
    block, hidden = f["block_configs"][layer]["ffn"], f["hidden_size"]
    if block.get("no_op"):
        return Ffn(0)
    if block.get("replace_with_linear"):
        return Ffn(linear(hidden, hidden))
    return Ffn(mlp_size(f, -(-int(2 * block["ffn_mult"] * hidden / 3) // 256) * 256))


def decilm_norms(f: Reader, layer: int) -> int:
    """One norm before each part that is there."""
    block = f["block_configs"][layer]
    return f["hidden_size"] * sum(not block[part].get("no_op") for part in ("attention", "ffn"))
