"""The decoder's mathematics without a cache: every token's query against every key it may see, in plain torch.

This is the truth that stands next to the fast path. It reads weights by their checkpoint names, fuses nothing,
keeps nothing, and costs a square of scores per head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.models.config import ModelConfig
from kvlab.models.rope import inverse_frequencies, rope_tables, rotate


def reference_forward(config: ModelConfig, weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """Logits [T, vocab] of the sequence `ids` [T], alone and from its start, in the dtype of `weights`."""
    hidden = _run(config, weights, ids, config.num_layers)
    head = weights["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"]
    return _norm(hidden, weights["model.norm.weight"], config) @ head.T


def layer_heads(
    config: ModelConfig, weights: Mapping[str, Tensor], ids: Tensor, layer: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [T, Hq, D], key and value [T, Hkv, D] of one layer for the sequence `ids` [T], as attention gets them.

    Raises:
        ValueError: the model has no such layer.
    """
    if not 0 <= layer < config.num_layers:
        raise ValueError(f"layer {layer}: must be 0 to {config.num_layers - 1}")
    return _rotated_heads(config, weights, _run(config, weights, ids, layer), layer)


def _run(config: ModelConfig, weights: Mapping[str, Tensor], ids: Tensor, layers: int) -> Tensor:
    """What leaves the first `layers` layers, [T, hidden]."""
    hidden = weights["model.embed_tokens.weight"][ids]
    for i in range(layers):
        layer = _Layer(weights, f"model.layers.{i}.")
        query, key, value = _rotated_heads(config, weights, hidden, i)
        seen = _attend(query, key, value, config.scale, config.windows[i])
        hidden = hidden + layer.linear("self_attn.o_proj", seen)
        normed = _norm(hidden, layer["post_attention_layernorm.weight"], config)
        gate = _activate(config.activation, layer.linear("mlp.gate_proj", normed))
        hidden = hidden + layer.linear("mlp.down_proj", gate * layer.linear("mlp.up_proj", normed))
    return hidden


def _rotated_heads(
    config: ModelConfig, weights: Mapping[str, Tensor], hidden: Tensor, i: int
) -> tuple[Tensor, Tensor, Tensor]:
    layer = _Layer(weights, f"model.layers.{i}.")
    query, key, value = _heads(config, layer, _norm(hidden, layer["input_layernorm.weight"], config))
    if config.rotated[i]:
        frequencies = inverse_frequencies(config.rope, config.head_dim, hidden.dtype)
        cos, sin = rope_tables(torch.arange(len(hidden)), frequencies, hidden.dtype)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    return query, key, value


def visible(num_tokens: int, window: int) -> Tensor:
    """bool [T, T]: whether the query of row t sees the key of column s; t - window < s <= t, or s <= t for window 0."""
    t = torch.arange(num_tokens)
    distance = t[:, None] - t[None, :]
    return (distance >= 0) & (distance < window) if window else distance >= 0


class _Layer:
    """The tensors of one layer by their names within it."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str) -> None:
        self.weights, self.prefix = weights, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[self.prefix + name]

    def linear(self, name: str, x: Tensor) -> Tensor:
        bias = self.weights.get(f"{self.prefix}{name}.bias")
        product = x @ self[name + ".weight"].T
        return product if bias is None else product + bias


def _norm(x: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_eps) * weight


def _heads(config: ModelConfig, layer: _Layer, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (
        layer.linear(f"self_attn.{name}_proj", normed).view(len(normed), -1, config.head_dim) for name in "qkv"
    )
    if config.qk_norm:
        query = _norm(query, layer["self_attn.q_norm.weight"], config)
        key = _norm(key, layer["self_attn.k_norm.weight"], config)
    return query, key, value


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
    """[T, Hq * D]: each query head attends with the KV head it shares with its neighbours."""
    queries_per_kv = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(queries_per_kv, dim=1) for x in (key, value))
    scores = torch.einsum("thd,shd->hts", query, key) * scale
    scores = scores.masked_fill(~visible(len(query), window), float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), value).flatten(1)


def _activate(name: str, x: Tensor) -> Tensor:
    if name == "silu":
        return x * torch.sigmoid(x)
    if name == "relu":
        return x.clamp(min=0)
    return F.gelu(x, approximate="tanh" if name == "gelu_pytorch_tanh" else "none")
