"""Layers that keep every key and value: how many KV heads, how wide, and how each family says so."""

from __future__ import annotations

from kvlab.specs.families.fields import Fields
from kvlab.specs.parts import Attention, CacheSpec

Parts = tuple[CacheSpec, ...]


def head_dim(f: Fields) -> int:
    """Width of a head: stated, the family's default, or hidden_size / num_attention_heads.

    Raises:
        ValueError: the division leaves a rest.
    """
    if f.get("head_dim") is not None:
        return f.need("head_dim")
    hidden, heads = f.need("hidden_size"), f.need("num_attention_heads")
    if hidden % heads:
        raise ValueError(
            f"{f.model_type} config: missing head_dim, and hidden_size {hidden} is not a multiple of "
            f"num_attention_heads {heads}"
        )
    return hidden // heads


def kv_heads(f: Fields) -> int:
    """KV heads: stated, the family's default, or one per query head where null (or absence) means that.

    Raises:
        ValueError: absent, and the family does not say what that means.
    """
    stated = f.has("num_key_value_heads")
    if f.get("num_key_value_heads") is not None or not (stated or "num_key_value_heads" in f.defaults):
        return f.need("num_key_value_heads")
    if not stated:
        f.note("num_key_value_heads is not in the config: one KV head per query head")
    return f.need("num_attention_heads")


def full(f: Fields) -> Parts:
    """Keys and values of every token, grouped as the config says."""
    return (Attention(kv_heads(f), head_dim(f), head_dim(f), f.formats.kv),)


def all_full(f: Fields) -> list[Parts]:
    """Every layer full."""
    return [full(f)] * f.num_layers


def with_kv_heads(f: Fields, heads: int) -> list[Parts]:
    """Every layer full, with `heads` KV heads."""
    return [(Attention(heads, head_dim(f), head_dim(f), f.formats.kv),)] * f.num_layers


def multi_head(f: Fields) -> list[Parts]:
    """Every layer full, one KV head per query head: the family has no other form."""
    return with_kv_heads(f, f.need("num_attention_heads"))


def multi_query_flag(f: Fields) -> list[Parts]:
    """One KV head when `multi_query` is set, else one per query head (gpt_bigcode)."""
    return with_kv_heads(f, 1 if f.get("multi_query") else f.need("num_attention_heads"))


def falcon(f: Fields) -> list[Parts]:
    """Old decoder with multi_query: 1 KV head, whatever num_kv_heads says. New decoder: num_kv_heads of them."""
    if f.get("new_decoder_architecture"):
        f.note("transformers repeats the KV heads before it caches them; serving engines keep num_kv_heads")
        return with_kv_heads(f, f.need("num_kv_heads"))
    return multi_query_flag(f)


def mpt(f: Fields) -> list[Parts]:
    """KV heads by attn_config.attn_type.

    Raises:
        ValueError: unknown attn_type.
    """
    kind = f.get("attn_type")
    if kind == "multihead_attention":
        return multi_head(f)
    if kind == "multiquery_attention":
        return with_kv_heads(f, 1)
    if kind == "grouped_query_attention":
        return with_kv_heads(f, f.need("num_key_value_heads"))
    raise ValueError(f"{f.model_type} config: attn_type {kind!r} is not known")


def chatglm(f: Fields) -> list[Parts]:
    """multi_query_group_num KV heads of kv_channels each when multi_query_attention is set."""
    if f.get("multi_query_attention"):
        return with_kv_heads(f, f.need("num_key_value_heads"))
    return multi_head(f)


def nemotron_nas(f: Fields) -> list[Parts]:
    """Layer by layer from block_configs: no attention, or num_attention_heads / n_heads_in_group KV heads.

    Raises:
        ValueError: block_configs missing, of another length, or a block whose attention keeps no plain KV.
    """
    blocks = f.listed("block_configs")
    if blocks is None or len(blocks) != f.num_layers:
        raise ValueError(f"{f.model_type} config: block_configs must be a list of {f.num_layers} blocks")
    heads, width = f.need("num_attention_heads"), head_dim(f)
    layers: list[Parts] = []
    for i, block in enumerate(blocks):
        attention = block.get("attention") or {}
        if attention.get("no_op") or attention.get("replace_with_linear"):
            layers.append(())
            continue
        group = attention.get("n_heads_in_group")
        if not group or heads % group or attention.get("window_length"):
            raise ValueError(f"{f.model_type} config: attention of block {i} is {attention}, must be grouped and full")
        layers.append((Attention(heads // group, width, width, f.formats.kv),))
    return layers
