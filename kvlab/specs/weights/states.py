"""Parameters of the mixers that keep a state instead of a cache."""

from __future__ import annotations

import math

from kvlab.specs.weights.blocks import Ffn, Mixer, ffn_width, linear, mlp_size
from kvlab.specs.weights.reader import Reader


def conv(channels: int, kernel: int, bias: bool = False) -> int:
    """A depthwise convolution over the last `kernel` tokens."""
    return channels * (kernel + bias)


def mamba1(inner_norms: bool = False) -> Mixer:
    """Mamba-1: per-channel state, step sizes through a low-rank projection (Jamba adds norms on dt, B, C)."""

    def count(f: Reader, layer: int) -> int:
        hidden, state = f["hidden_size"], f["state_size"]
        inner = _mamba1_width(f)
        rank = f.get("time_step_rank")
        rank = math.ceil(hidden / 16) if rank in (None, "auto") else rank
        n = linear(hidden, 2 * inner, f.flag("mamba_bias")) + linear(inner, hidden, f.flag("mamba_bias"))
        n += conv(inner, f["conv_kernel"], f.flag("conv_bias"))
        n += linear(inner, rank + 2 * state) + linear(rank, inner, bias=True)
        return n + inner * state + inner + (rank + 2 * state) * inner_norms

    return count


def _mamba1_width(f: Reader) -> int:
    # Falcon-Mamba's file states 16 as `expand` and the true width beside it; Jamba's intermediate_size is its MLP's
    if f.family in ("mamba", "falcon_mamba") and f.get("intermediate_size"):
        return f["intermediate_size"]
    return int(f["expand"] * f["hidden_size"])


def mamba2(f: Reader, inner: int, heads: int, gated_norm: bool = True, out_bias: bool | None = None) -> int:
    """Mamba-2: one decay per head, B and C shared by the heads of a group (n_groups)."""
    hidden, bias = f["hidden_size"], f.flag("mamba_bias")
    channels = inner + 2 * f["n_groups"] * f["state_size"]
    n = linear(hidden, inner + channels + heads, bias)
    n += linear(inner, hidden, bias if out_bias is None else out_bias)
    # dt_bias, A_log and D: one each per head
    return n + conv(channels, f["conv_kernel"], f.flag("conv_bias")) + 3 * heads + inner * gated_norm


def mamba2_expanded(f: Reader, layer: int) -> int:
    """Mamba-2 as wide as `expand` times the hidden size (Mamba-2, Bamba, Granite 4, Zamba2)."""
    return mamba2(f, int(f["expand"] * f["hidden_size"]), f["mamba_heads"])


def mamba2_by_heads(f: Reader, layer: int) -> int:
    """Mamba-2 as wide as its heads (Nemotron-H)."""
    return mamba2(f, f["mamba_heads"] * f["mamba_head_width"], f["mamba_heads"])


def mamba2_falcon(f: Reader, layer: int) -> int:
    """Mamba-2 beside attention in Falcon-H1: own width, norm and output bias optional."""
    inner = f.get("mamba_d_ssm") or int(f["expand"] * f["hidden_size"])
    return mamba2(f, inner, f["mamba_heads"], f.flag("mamba_rms_norm"), f.flag("projectors_bias"))


def gated_delta_net(f: Reader, layer: int) -> int:
    """Gated DeltaNet (Qwen3-Next, Qwen3.5): q, k, v through one convolution; z, b, a projections; A_log, dt_bias."""
    hidden, heads = f["hidden_size"], f["linear_num_value_heads"]
    keys, values = f["linear_num_key_heads"] * f["linear_key_head_dim"], heads * f["linear_value_head_dim"]
    n = linear(hidden, 2 * keys + 2 * values) + linear(hidden, 2 * heads) + linear(values, hidden)
    return n + conv(2 * keys + values, f["linear_conv_kernel_dim"]) + 2 * heads + f["linear_value_head_dim"]


def kda(f: Reader, layer: int) -> int:
    """Kimi Delta Attention: a decay per channel from a low-rank gate, an output gate of the same form."""
    stated = f.get("linear_attn_config") or {}
    heads = stated.get("num_heads") or f["linear_num_heads"]
    dim = stated.get("head_dim") or f["linear_head_dim"]
    kernel = stated.get("short_conv_kernel_size") or f["linear_conv_kernel_dim"]
    hidden, width = f["hidden_size"], heads * dim
    n = 3 * linear(hidden, width) + conv(3 * width, kernel) + linear(width, hidden)
    n += 2 * (linear(hidden, dim) + linear(dim, width)) + linear(hidden, heads)
    return n + width + heads + dim


def short_conv(f: Reader, layer: int) -> int:
    """LFM2's gated short convolution."""
    hidden, bias = f["hidden_size"], f.flag("conv_bias")
    return linear(hidden, 3 * hidden, bias) + conv(hidden, f["conv_kernel"], bias) + linear(hidden, hidden, bias)


def lightning(f: Reader, layer: int) -> int:
    """Lightning attention (MiniMax-01): q, k, v of every head, an output gate, a norm over the whole width."""
    hidden, width = f["hidden_size"], f["num_attention_heads"] * f.head_dim()
    return linear(hidden, 3 * width) + linear(hidden, width) + linear(width, hidden) + width


def rg_lru(f: Reader, layer: int) -> int:
    """The gated linear recurrent unit of RecurrentGemma: block-diagonal gates, one block per head."""
    hidden, width, heads = f["hidden_size"], f.get("lru_width") or f["hidden_size"], f["num_attention_heads"]
    gates = 2 * (width * width // heads + width)
    n = 2 * linear(hidden, width, bias=True) + linear(width, hidden, bias=True)
    return n + conv(width, f["conv1d_width"], bias=True) + width + gates


def rwkv_time_mix(f: Reader, layer: int) -> int:
    """RWKV-4: key, value, receptance, output; decay and bonus per channel; three mixing vectors."""
    hidden, width = f["hidden_size"], f.get("attention_hidden_size") or f["hidden_size"]
    return 3 * linear(hidden, width) + linear(width, hidden) + 2 * width + 3 * hidden


def rwkv_channel_mix(f: Reader, layer: int) -> Ffn:
    """RWKV-4's network: key, value and a gate of the hidden size, two mixing vectors."""
    hidden = f["hidden_size"]
    return Ffn(mlp_size(f, ffn_width(f), gated=False) + linear(hidden, hidden) + 2 * hidden)
