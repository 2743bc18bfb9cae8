"""Parameters of the blocks every decoder is made of. A mixer or an ffn here is a function of (reader, layer)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvlab.specs.weights.reader import Reader

Fact = bool | str
Mixer = Callable[[Reader, int], int]


class Ffn(NamedTuple):
    """Parameters of one layer's feed-forward part: `shared`, and `expert` for each of `experts` routed experts."""

    shared: int
    expert: int = 0
    experts: int = 0


FfnRule = Callable[[Reader, int], Ffn]


def linear(inputs: int, outputs: int, bias: bool = False) -> int:
    """A matrix and perhaps its bias."""
    return inputs * outputs + outputs * bias


def attention(
    qkv_bias: Fact = False,
    out_bias: Fact | None = None,
    qk_norm: str = "",
    qk_norm_if: Fact = True,
    gate: bool = False,
    sinks: bool = False,
) -> Mixer:
    """Grouped-query attention.

    Args:
        qkv_bias, out_bias: a fact or the field that holds it; out_bias None follows qkv_bias.
        qk_norm: "head" one gain per head_dim, "head+bias" with a bias, "width" one gain per head and channel.
        qk_norm_if: whether those norms exist.
        gate: the query projection is twice as wide, its second half gating the output.
        sinks: one learned logit per query head.
    """

    def count(f: Reader, layer: int) -> int:
        hidden, dim, heads, kv = f["hidden_size"], f.head_dim(), f["num_attention_heads"], f.kv_heads()
        bias = f.flag(qkv_bias)
        n = linear(hidden, heads * dim * (1 + gate), bias) + 2 * linear(hidden, kv * dim, bias)
        n += linear(heads * dim, hidden, bias if out_bias is None else f.flag(out_bias))
        if qk_norm and f.flag(qk_norm_if):
            n += {"head": 2 * dim, "head+bias": 4 * dim, "width": (heads + kv) * dim}[qk_norm]
        return n + heads * sinks

    return count


def mla(f: Reader, layer: int) -> int:
    """Latent attention: one compressed latent per token, expanded per head (DeepSeek-V2, section 2.1)."""
    hidden, heads, latent = f["hidden_size"], f["num_attention_heads"], f["kv_lora_rank"]
    nope, rope, value = f["qk_nope_head_dim"], f["qk_rope_head_dim"], _value_dim(f)
    bias, query_rank = f.flag("attention_bias"), f.get("q_lora_rank")
    if query_rank:
        n = linear(hidden, query_rank, bias) + query_rank + linear(query_rank, heads * (nope + rope))
    else:
        n = linear(hidden, heads * (nope + rope))
    n += linear(hidden, latent + rope, bias) + latent + linear(latent, heads * (nope + value))
    return n + linear(heads * value, hidden, bias)


def _value_dim(f: Reader) -> int:
    # MiniCPM3's published file leaves it out: hidden size over heads
    return f.get("v_head_dim") or f.head_dim()


def mla_with_index(f: Reader, layer: int) -> int:
    """Latent attention and, in layers that own one, the indexer that picks which latents to read."""
    types = f.get("indexer_types") or _indexer_schedule(f)
    return mla(f, layer) + (indexer(f) if types is None or types[layer] == "full" else 0)


def indexer(f: Reader) -> int:
    """Index queries from the query latent, one index key per token with a LayerNorm, and head weights."""
    hidden, heads, dim = f["hidden_size"], f["index_n_heads"], f["index_head_dim"]
    return linear(f["q_lora_rank"], heads * dim) + linear(hidden, dim) + 2 * dim + linear(hidden, heads)


def _indexer_schedule(f: Reader) -> list[str] | None:
    pattern, freq = f.get("index_topk_pattern"), max(f.get("index_topk_freq") or 1, 1)
    if pattern is not None:
        return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    if freq == 1:
        return None
    offset = f.get("index_skip_topk_offset")
    offset = 2 if offset is None else offset
    return ["full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(f["num_hidden_layers"])]


def mlp_size(f: Reader, width: int, gated: bool = True, bias: Fact = False) -> int:
    """Up (and gate) and down projections of one feed-forward network."""
    b, hidden = f.flag(bias), f["hidden_size"]
    return (1 + gated) * linear(hidden, width, b) + linear(width, hidden, b)


def ffn_width(f: Reader) -> int:
    """intermediate_size, four times the hidden size when not stated."""
    return f.get("intermediate_size") or 4 * f["hidden_size"]


def mlp(gated: bool = True, bias: Fact = False) -> FfnRule:
    """A dense feed-forward network in every layer."""

    def count(f: Reader, layer: int) -> Ffn:
        return Ffn(mlp_size(f, ffn_width(f), gated, bias))

    return count


def moe(
    routed: Callable[[Reader, int], bool] = lambda f, layer: True,
    width: str = "moe_intermediate_size",
    shared: str = "",
    router_bias: bool = False,
    expert_bias: bool = False,
    mlp_bias: Fact = False,
) -> FfnRule:
    """Routed experts where `routed`, a dense network elsewhere.

    Args:
        width: field with an expert's width.
        shared: "count" n_shared_experts experts side by side, "gated" one of its own width behind a sigmoid gate,
            "width" one of width shared_intermediate_size, "" none.
        mlp_bias: biases of dense and shared networks.
    """

    def count(f: Reader, layer: int) -> Ffn:
        experts = f.get("num_experts") or 0
        if not experts or not routed(f, layer):
            return Ffn(mlp_size(f, ffn_width(f), bias=mlp_bias))
        each = f[width]
        n = linear(f["hidden_size"], experts, router_bias) + _shared_experts(f, shared, each, mlp_bias)
        return Ffn(n, mlp_size(f, each, bias=expert_bias), experts)

    return count


def _shared_experts(f: Reader, kind: str, width: int, bias: Fact) -> int:
    if kind == "count":
        return mlp_size(f, width * (f.get("n_shared_experts") or 0), bias=bias)
    if kind == "gated":
        return mlp_size(f, f["shared_expert_intermediate_size"]) + f["hidden_size"]
    if kind == "width":
        return mlp_size(f, f.get("shared_intermediate_size") or 0)
    return 0


def after_first_dense(f: Reader, layer: int) -> bool:
    """DeepSeek: the first `first_k_dense_replace` layers are dense, unless mlp_layer_types says otherwise."""
    types, dense = f.get("mlp_layer_types"), f.get("first_k_dense_replace")
    # the classes without that field (GLM-4.7-Flash, Kimi Linear) have one dense layer
    return types[layer] == "sparse" if types else layer >= (1 if dense is None else dense)


def sparse_step(f: Reader, layer: int) -> bool:
    """Qwen: every `decoder_sparse_step`-th layer routes, except those of mlp_only_layers."""
    # read past the class defaults: 1 in all of them, and no shape a note should speak of
    step = f.config.get("decoder_sparse_step") or 1
    return layer not in (f.get("mlp_only_layers") or ()) and (layer + 1) % step == 0


def after_dense_layers(f: Reader, layer: int) -> bool:
    """LFM2-MoE and AFMoE: the first `num_dense_layers` layers are dense."""
    return layer >= f["num_dense_layers"]


def ernie_routes(f: Reader, layer: int) -> bool:
    """Ernie 4.5: every moe_layer_interval-th layer from moe_layer_start_index to moe_layer_end_index routes."""
    last = f.get("moe_layer_end_index")
    last = f["num_hidden_layers"] - 1 if last in (None, -1) else last
    start, step = f["moe_layer_start_index"], f["moe_layer_interval"]
    return (layer + 1) % step == 0 and start <= layer <= last
