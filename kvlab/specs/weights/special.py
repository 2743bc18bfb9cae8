"""Families with parts of their own: OPT, Falcon, MLlama, Gemma 3n and 4, Zamba2, DeepSeek V4."""

from __future__ import annotations

from kvlab.specs.weights.blocks import Ffn, attention, linear, mla, mlp_size
from kvlab.specs.weights.reader import Reader


def opt_outside(f: Reader) -> int:
    """Projections to and from a narrower embedding, and the final norm of the pre-norm models."""
    hidden, narrow = f["hidden_size"], f.get("word_embed_proj_dim") or f["hidden_size"]
    n = 2 * linear(hidden, narrow) if narrow != hidden else 0
    normed = f.flag("do_layer_norm_before") and not f.flag("_remove_final_layer_norm")
    return n + opt_norm(f) * normed


def opt_norm(f: Reader) -> int:
    """A LayerNorm with gain and bias, or without either."""
    return 2 * f["hidden_size"] * f.flag("layer_norm_elementwise_affine")


def falcon_mixer(f: Reader, layer: int) -> int:
    """Fused q, k, v: num_kv_heads groups in the new architecture, one group with multi_query, else one per head."""
    hidden, heads, bias = f["hidden_size"], f["num_attention_heads"], f.flag("bias")
    dim = hidden // heads
    grouped = f.flag("new_decoder_architecture")
    kv = f.kv_heads() if grouped else 1 if f.flag("multi_query") else heads
    return linear(hidden, (heads + 2 * kv) * dim, bias) + linear(hidden, hidden, bias)


def falcon_norms(f: Reader, layer: int) -> int:
    """Two LayerNorms, or one where attention and network run side by side from the same input."""
    new = f.flag("new_decoder_architecture")
    parallel = new or f.flag("parallel_attn")
    stated = f.get("num_ln_in_parallel_attn")
    norms = (stated or (2 if new else 1)) if parallel else 2
    return 2 * f["hidden_size"] * norms


def afmoe_mixer(f: Reader, layer: int) -> int:
    """Attention with QK norms, its output gated by a projection of its own."""
    gate = linear(f["hidden_size"], f["num_attention_heads"] * f.head_dim())
    return attention("attention_bias", qk_norm="head")(f, layer) + gate


def apertus_ffn(f: Reader, layer: int) -> Ffn:
    """An ungated network whose activation has two learned numbers."""
    return Ffn(mlp_size(f, f["intermediate_size"], gated=False) + 2)


def gpt_bigcode_mixer(f: Reader, layer: int) -> int:
    """One KV head with multi_query, all heads without."""
    hidden, heads = f["hidden_size"], f["num_attention_heads"]
    kv = hidden // heads if f.flag("multi_query") else hidden
    return linear(hidden, hidden + 2 * kv, bias=True) + linear(hidden, hidden, bias=True)


def mllama_mixer(f: Reader, layer: int) -> int:
    """Self-attention, or in cross_attention_layers attention to the image with QK norms and two scalar gates."""
    crossing = f.get("cross_attention_layers")
    crossing = (3, 8, 13, 18, 23, 28, 33, 38) if crossing is None else crossing
    return attention(qk_norm="head")(f, layer) + 2 if layer in crossing else attention()(f, layer)


def deepseek_v2_mixer(f: Reader, layer: int) -> int:
    """Latent attention; plain attention in the small DeepSeek-VL2, whose file says use_mla false."""
    return attention("attention_bias")(f, layer) if f.get("use_mla") is False else mla(f, layer)


def _shares_kv(f: Reader, layer: int) -> bool:
    return layer >= f["num_hidden_layers"] - (f.get("num_kv_shared_layers") or 0)


def _per_layer_input(f: Reader) -> int:
    hidden, width = f["hidden_size"], f.get("hidden_size_per_layer_input") or 0
    return 2 * linear(hidden, width) + hidden if width else 0


def per_layer_table(f: Reader) -> tuple[int, int]:
    """(rows, width) of the table that gives each layer its own input per token (Gemma 3n and 4)."""
    width = f.get("hidden_size_per_layer_input") or 0
    return (f["vocab_size_per_layer_input"], f["num_hidden_layers"] * width) if width else (0, 0)


def per_layer_outside(f: Reader) -> int:
    """The projection of the hidden state into the per-layer inputs, and its norm."""
    width = f.get("hidden_size_per_layer_input") or 0
    return linear(f["hidden_size"], f["num_hidden_layers"] * width) + width


def gemma3n_mixer(f: Reader, layer: int) -> int:
    """Attention (no k, v in layers that reuse an earlier cache), AltUp, Laurel, per-layer input."""
    hidden, dim, streams, rank = f["hidden_size"], f.head_dim(), f["altup_num_inputs"], f["laurel_rank"]
    n = attention("attention_bias", qk_norm="head")(f, layer)
    if _shares_kv(f, layer):
        n -= 2 * linear(hidden, f.kv_heads() * dim, f.flag("attention_bias")) + dim
    # AltUp: output scale, router norm, router, prediction and correction coefficients
    n += 2 * hidden + linear(hidden, streams) + streams**3 + streams**2
    return n + 2 * linear(hidden, rank) + hidden + _per_layer_input(f)


def gemma3n_ffn(f: Reader, layer: int) -> Ffn:
    """A gated network; its width may differ by layer."""
    width = f["intermediate_size"]
    return Ffn(mlp_size(f, width[layer] if isinstance(width, (list, tuple)) else width))


def gemma3n_outside(f: Reader) -> int:
    """The per-layer projection, and AltUp's projections in and out of each extra stream."""
    return per_layer_outside(f) + 2 * (f["altup_num_inputs"] - 1) * linear(f["hidden_size"], f["hidden_size"])


def _gemma4_global(f: Reader, layer: int) -> bool:
    types, last = f.layer_types(), f["num_hidden_layers"] - 1
    return layer == last or (types[layer] == "full_attention" if types else (layer + 1) % 6 == 0)


def gemma4_mixer(f: Reader, layer: int) -> int:
    """Attention whose global layers have wider, fewer KV heads and may use k as v; shared-KV layers have no k, v."""
    hidden, heads, bias, full = (
        f["hidden_size"], f["num_attention_heads"], f.flag("attention_bias"), _gemma4_global(f, layer),
    )  # fmt: skip
    k_is_v = f.flag("attention_k_eq_v") and full
    dim = (f.get("global_head_dim") or 512) if full else f.head_dim()
    kv = (f.get("num_global_key_value_heads") if k_is_v else None) or f.kv_heads()
    n = linear(hidden, heads * dim, bias) + linear(heads * dim, hidden, bias) + dim + _per_layer_input(f)
    if not _shares_kv(f, layer):
        n += (1 if k_is_v else 2) * linear(hidden, kv * dim, bias) + dim
    return n


def gemma4_ffn(f: Reader, layer: int) -> Ffn:
    """A dense network (twice as wide where KV is shared, if so stated), and experts beside it with three more norms."""
    hidden, doubled = f["hidden_size"], f.flag("use_double_wide_mlp") and _shares_kv(f, layer)
    dense = mlp_size(f, f["intermediate_size"] * (2 if doubled else 1))
    if not f.flag("enable_moe_block"):
        return Ffn(dense)
    experts = f["num_experts"]
    # the router has a scale per channel and one per expert
    router = linear(hidden, experts) + hidden + experts
    return Ffn(dense + router + 3 * hidden, mlp_size(f, f["moe_intermediate_size"]), experts)


def _zamba2_uses(f: Reader) -> int:
    types = f.layer_types()
    if types is None:
        types = ["m"] + (["m"] * 5 + ["hybrid"]) * 7 + ["m"] * 4 + ["hybrid"] + ["m"] * 3 + ["hybrid"] + ["m"] * 2
    return sum(kind == "hybrid" for kind in types[: f["num_hidden_layers"]])


def zamba2_block(f: Reader) -> int:
    """One shared block: attention and network over the state joined with the embedding (width twice the hidden)."""
    hidden, heads = f["hidden_size"], f["num_attention_heads"]
    width, dim = 2 * hidden, 2 * hidden // heads
    n = linear(width, heads * dim) + 2 * linear(width, f.kv_heads() * dim) + linear(heads * dim, hidden)
    inner = f.get("intermediate_size") or 4 * hidden
    return n + mlp_size(f, inner, bias="add_bias_linear") + width + hidden


def zamba2_outside(f: Reader) -> int:
    """The shared blocks, and for each use its low-rank adapters and the matrix into the residual stream."""
    hidden, uses, rank = f["hidden_size"], _zamba2_uses(f), f["adapter_rank"]
    inner = f.get("intermediate_size") or 4 * hidden
    each = linear(hidden, rank) + linear(rank, 2 * inner) + linear(hidden, hidden)
    if f.flag("use_shared_attention_adapter"):
        each += 3 * 2 * linear(2 * hidden, rank)
    return min(f["num_mem_blocks"], uses) * zamba2_block(f) + uses * each


def zamba2_reread(f: Reader) -> int:
    """Shared blocks are read at each use: their parameters once more for every use after the first."""
    uses = _zamba2_uses(f)
    return (uses - min(f["num_mem_blocks"], uses)) * zamba2_block(f)


_V4_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def _v4_layer(f: Reader, layer: int) -> tuple[str, int]:
    types, ratios = f.layer_types(), f.get("compress_ratios")
    if types is None and ratios is not None:
        names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
        kind = names[ratios[layer]]
    elif types is not None:
        kind = types[layer]
    else:
        # transformers' default: two heavily compressed layers, then the two kinds in turn
        kind = "compressed_sparse_attention" if layer >= 2 and layer % 2 else "heavily_compressed_attention"
    rates = {**_V4_RATES, **(f.get("compress_rates") or {})}
    return kind, rates.get(kind, 0)


def _compressor(f: Reader, rate: int, width: int, norm: int) -> int:
    # keys, their gates, a bias per position inside a window, a norm over the entry
    return 2 * linear(f["hidden_size"], width) + rate * width + norm


def deepseek_v4_mixer(f: Reader, layer: int) -> int:
    """Window attention with one KV head, low-rank q and grouped low-rank output, a compressor by layer, sinks.

    Two hyper-connections (before the mixer and the network) mix hc_mult residual streams.
    """
    hidden, heads, dim, rank = f["hidden_size"], f["num_attention_heads"], f["head_dim"], f["q_lora_rank"]
    groups, out_rank, streams = f["o_groups"], f["o_lora_rank"], f["hc_mult"]
    n = linear(hidden, rank) + rank + linear(rank, heads * dim) + linear(hidden, dim) + dim + heads
    n += linear(heads * dim // groups, groups * out_rank) + linear(groups * out_rank, hidden)
    kind, rate = _v4_layer(f, layer)
    if kind == "heavily_compressed_attention":
        n += _compressor(f, rate, dim, dim)
    elif kind == "compressed_sparse_attention":
        index, index_heads = f["index_head_dim"], f["index_n_heads"]
        n += _compressor(f, rate, 2 * dim, dim) + _compressor(f, rate, 2 * index, index)
        n += linear(rank, index_heads * index) + linear(hidden, index_heads)
    mix = (2 + streams) * streams
    return n + 2 * (linear(streams * hidden, mix) + mix + 3)


def deepseek_v4_outside(f: Reader) -> int:
    """The head that folds the residual streams into one."""
    return linear(f["hc_mult"] * f["hidden_size"], f["hc_mult"]) + f["hc_mult"] + 1


def deepseek_v4_ffn(f: Reader, layer: int) -> Ffn:
    """Routed experts and one shared expert in every layer (hash-routed layers keep a router matrix too)."""
    experts, each = f["num_experts"], mlp_size(f, f["moe_intermediate_size"])
    shared = mlp_size(f, f["moe_intermediate_size"], bias="mlp_bias")
    return Ffn(linear(f["hidden_size"], experts) + shared, each, experts)
