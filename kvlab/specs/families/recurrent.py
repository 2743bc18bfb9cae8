"""Layers with a state of fixed size, alone or between and beside attention.

Convolutions keep the k - 1 inputs that the next token still reads (transformers stores k columns).
Sizes follow vLLM's MambaStateShapeCalculator; the units of an array are what tensor parallelism splits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvlab.specs.families.dense import Parts, full, kv_heads
from kvlab.specs.families.fields import Fields
from kvlab.specs.families.latent import latent
from kvlab.specs.families.linear import matrices
from kvlab.specs.families.windows import by_type, every, layer_types, sliding
from kvlab.specs.parts import Attention, RecurrentState, StateArray

Units = tuple[tuple[int, int], ...]


def _state(f: Fields, mechanism: str, *, conv: Units, kernel: int, state: Units) -> Parts:
    arrays = [StateArray("conv", conv, kernel - 1, f.formats.conv)] if kernel > 1 else []
    if state:
        arrays.append(StateArray("state", state, 1, f.formats.state))
    return (RecurrentState(mechanism, tuple(arrays)),)


def mamba1(f: Fields) -> Parts:
    """Convolution inputs and a d_inner x d_state matrix."""
    inner, state = _inner(f), f.need("mamba_d_state")
    return _state(f, "mamba1", conv=((inner, 1),), kernel=f.need("mamba_d_conv"), state=((inner, state),))


def mamba2(f: Fields) -> Parts:
    """Inputs of the convolution over x, B and C, and one head_dim x d_state matrix per head."""
    heads, width = _mamba2_heads(f)
    groups, state = f.need("mamba_n_groups"), f.need("mamba_d_state")
    conv = ((heads, width), (groups, 2 * state))
    return _state(f, "mamba2", conv=conv, kernel=f.need("mamba_d_conv"), state=((heads, width * state),))


def _inner(f: Fields) -> int:
    """Channels inside a Mamba block: stated, or mamba_expand x hidden_size."""
    stated = f.get("mamba_inner_size") is not None
    return f.need("mamba_inner_size") if stated else f.need("mamba_expand") * f.need("hidden_size")


def _mamba2_heads(f: Fields) -> tuple[int, int]:
    """Heads of a Mamba-2 block and their width; the one that is missing (or "auto") follows from the inner width.

    Raises:
        ValueError: neither is stated, or the known one does not divide the inner width.
    """
    heads, width = f.get("mamba_n_heads"), f.get("mamba_d_head")
    if isinstance(heads, int) and isinstance(width, int):
        return f.need("mamba_n_heads"), f.need("mamba_d_head")
    inner, known = _inner(f), f.need("mamba_d_head" if isinstance(width, int) else "mamba_n_heads")
    if inner % known:
        raise ValueError(f"{f.model_type} config: {known} Mamba heads or channels per head must divide {inner}")
    return (inner // known, known) if isinstance(width, int) else (known, inner // known)


def gated_delta(f: Fields) -> Parts:
    """Inputs of the convolution over q, k and v, and one key_dim x value_dim matrix per value head."""
    key_heads, value_heads = f.need("linear_num_key_heads"), f.need("linear_num_value_heads")
    key, value = f.need("linear_key_head_dim"), f.need("linear_value_head_dim")
    conv = ((key_heads, 2 * key), (value_heads, value))
    kernel = f.need("linear_conv_kernel_dim")
    return _state(f, "gated_delta", conv=conv, kernel=kernel, state=((value_heads, key * value),))


def kda(f: Fields) -> Parts:
    """Kimi delta attention: inputs of three convolutions and one head_dim x head_dim matrix per head."""
    heads, width = f.need("linear_num_heads"), f.need("linear_head_dim")
    kernel = f.need("linear_conv_kernel_dim")
    return _state(f, "kda", conv=((heads, 3 * width),), kernel=kernel, state=((heads, width * width),))


def short_conv(f: Fields) -> Parts:
    """Inputs of a short convolution over hidden_size channels, nothing else."""
    return _state(f, "short_conv", conv=((f.need("hidden_size"), 1),), kernel=f.need("conv_L_cache"), state=())


def lightning(f: Fields) -> Parts:
    """One head_dim x head_dim matrix per query head, no convolution."""
    heads, width = f.need("num_attention_heads"), f.need("head_dim")
    return _state(f, "lightning", conv=(), kernel=0, state=((heads, width * width),))


def rg_lru(f: Fields) -> Parts:
    """Convolution inputs and one value per channel (Griffin's recurrence)."""
    width = f.need("lru_width") if f.get("lru_width") else f.need("hidden_size")
    return _state(f, "rg_lru", conv=((width, 1),), kernel=f.need("conv1d_width"), state=((width, 1),))


def rwkv4(f: Fields) -> Parts:
    """Two previous inputs, and numerator, denominator and maximum of the running average."""
    inner = f.need("attention_hidden_size") if f.get("attention_hidden_size") else f.need("hidden_size")
    return _state(f, "rwkv4", conv=((f.need("hidden_size"), 2),), kernel=2, state=((inner, 3),))


def nothing(f: Fields) -> Parts:
    """A layer that caches nothing (MLP, mixture of experts)."""
    return ()


def every_layer(part: Callable[[Fields], Parts]) -> Callable[[Fields], list[Parts]]:
    """A builder that makes every layer `part`."""
    return lambda f: [part(f)] * f.num_layers


def jamba(f: Fields) -> list[Parts]:
    """Attention where i % attn_layer_period == attn_layer_offset, Mamba-1 elsewhere."""
    period, offset = f.need("attn_layer_period"), f.get("attn_layer_offset")
    kinds = ["linear_attention" if i % period != offset else "full_attention" for i in range(f.num_layers)]
    return by_type(f, layer_types(f, kinds), {"full_attention": full, "linear_attention": mamba1})


def bamba(f: Fields) -> list[Parts]:
    """Attention in the layers of attn_layer_indices, Mamba-2 elsewhere."""
    attention = set(f.listed("attn_layer_indices") or ())
    kinds = ["full_attention" if i in attention else "linear_attention" for i in range(f.num_layers)]
    return by_type(f, layer_types(f, kinds), {"full_attention": full, "linear_attention": mamba2})


def granite_hybrid(f: Fields) -> list[Parts]:
    """By layer_types, attention or Mamba-2."""
    return by_type(f, layer_types(f), {"full_attention": full, "linear_attention": mamba2})


def zamba2(f: Fields) -> list[Parts]:
    """Mamba-2 in every layer; hybrid layers also run a shared attention block, each with a cache of its own.

    The block reads hidden state and embedding side by side, so its heads are twice as wide.
    """

    def hybrid(f: Fields) -> Parts:
        width = 2 * f.need("hidden_size") // f.need("num_attention_heads")
        return (Attention(kv_heads(f), width, width, f.formats.kv), *mamba2(f))

    return by_type(f, layer_types(f), {"hybrid": hybrid, "linear_attention": mamba2})


def falcon_h1(f: Fields) -> list[Parts]:
    """Attention and Mamba-2 side by side in every layer."""
    return [(*full(f), *mamba2(f))] * f.num_layers


def nemotron_h(f: Fields) -> list[Parts]:
    """By layers_block_type or the letters of hybrid_override_pattern: M Mamba-2, * attention, - and E nothing.

    Raises:
        ValueError: neither list nor pattern, or an unknown letter.
    """
    letters = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    kinds, pattern = f.listed("layers_block_type"), f.get("hybrid_override_pattern")
    if kinds is None:
        if not isinstance(pattern, str) or set(pattern) - set(letters):
            raise ValueError(f"{f.model_type} config: missing layers_block_type or hybrid_override_pattern of M * - E")
        kinds = [letters[x] for x in pattern]
    kinds = [{"mamba": "linear_attention", "attention": "full_attention"}.get(kind, kind) for kind in kinds]
    build = {"linear_attention": mamba2, "full_attention": full, "mlp": nothing, "moe": nothing}
    return by_type(f, kinds, build)


def delta_hybrid(f: Fields) -> list[Parts]:
    """Every 4th layer (full_attention_interval) attention, gated delta net between."""
    kinds = every(4, "linear_attention")(f)
    return by_type(f, kinds, {"full_attention": full, "linear_attention": gated_delta})


def kimi_linear(f: Fields) -> list[Parts]:
    """MLA in linear_attn_config.full_attn_layers, KDA in kda_layers, both counted from 1.

    Raises:
        ValueError: the two lists do not name every layer once.
    """
    attention, linear = f.listed("full_attn_layers"), f.listed("kda_layers")
    if attention is not None and linear is not None:
        if sorted(attention + linear) != list(range(1, f.num_layers + 1)):
            raise ValueError(
                f"{f.model_type} config: full_attn_layers and kda_layers must name each layer once, from 1"
            )
        kinds = ["full_attention" if i + 1 in attention else "linear_attention" for i in range(f.num_layers)]
    else:
        kinds = layer_types(f)
    return by_type(f, kinds, {"full_attention": latent, "linear_attention": kda})


def lfm2(f: Fields) -> list[Parts]:
    """By layer_types or full_attn_idxs, attention or a short convolution."""
    where = f.listed("full_attn_idxs")
    kinds = where and ["full_attention" if i in where else "conv" for i in range(f.num_layers)]
    return by_type(f, layer_types(f, kinds), {"full_attention": full, "conv": short_conv})


def minimax(f: Fields) -> list[Parts]:
    """By layer_types, or attn_type_list (1 softmax, 0 lightning)."""
    flags = f.listed("attn_type_list")
    kinds = flags and ["full_attention" if flag else "linear_attention" for flag in flags[: f.num_layers]]
    return by_type(f, layer_types(f, kinds), {"full_attention": full, "linear_attention": lightning})


def recurrent_gemma(f: Fields) -> list[Parts]:
    """block_types repeated over the layers: "recurrent" RG-LRU, "attention" a window."""
    blocks = f.listed("block_types") or []
    if not blocks or set(blocks) - {"recurrent", "attention"}:
        raise ValueError(f"{f.model_type} config: block_types is {blocks}, must name recurrent and attention blocks")
    made = {"recurrent": rg_lru(f), "attention": sliding(f)}
    return [made[blocks[i % len(blocks)]] for i in range(f.num_layers)]


def hybrid_pattern(num_layers: int, config: Mapping[str, Any]) -> list[str]:
    """The kinds of layers of a native hybrid from its ratio: a period is `recurrent_layers` layers of `recurrent_kind`
    and then `attention_layers` layers of `attention_kind`; a last period may be cut off.

    Raises:
        ValueError: a negative number, or a ratio of nothing to nothing.
    """
    attention, recurrent = config.get("attention_layers", 1), config.get("recurrent_layers", 3)
    if attention < 0 or recurrent < 0 or not attention + recurrent:
        raise ValueError(f"attention_layers {attention}, recurrent_layers {recurrent}: must be a ratio of layers")
    kinds = (config.get("recurrent_kind", "mamba2"), config.get("attention_kind", "full_attention"))
    period = [kinds[0]] * recurrent + [kinds[1]] * attention
    return [period[i % len(period)] for i in range(num_layers)]


def native_hybrid(f: Fields) -> list[Parts]:
    """By layer_types or the ratio (`hybrid_pattern`): full or sliding attention, Mamba-2, gated delta net, or linear
    attention."""
    kinds = f.listed("layer_types") or hybrid_pattern(f.num_layers, f.config)
    build = {
        "full_attention": full, "sliding_attention": sliding, "mamba2": mamba2, "gated_delta": gated_delta,
        "linear_attention": lambda f: matrices(f, "linear_attention", 1),
    }  # fmt: skip
    return by_type(f, layer_types(f, kinds), build)


def hymba(f: Fields) -> list[Parts]:
    """Attention and Mamba heads side by side in every layer; meta tokens are ordinary first positions."""
    return [(*full(f), *mamba1(f))] * f.num_layers
