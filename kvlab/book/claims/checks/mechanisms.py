"""Checks on what a mechanism keeps and reads: values, states, patterns of layers, small shapes of their own."""

from __future__ import annotations

from typing import Any

from kvlab.book.claims.checks.registry import Value, check
from kvlab.book.claims.checks.shapes import changed, model_spec, token_readings
from kvlab.cache.manager import KVCacheManager
from kvlab.plan.derivation import NAMES
from kvlab.specs.catalogue import expand
from kvlab.specs.families import fields_of, from_config
from kvlab.specs.families.fields import Formats
from kvlab.specs.formats import get_format
from kvlab.specs.layout import group_parts
from kvlab.specs.model import ModelSpec
from kvlab.specs.parts import CacheSpec
from kvlab.specs.resolve import resolve
from kvlab.specs.units import gb, gib, human_bytes
from kvlab.specs.weights import count

Shape = dict[str, Any]
LISTS = ("layer_types", "compress_ratios", "attn_type_list")


def shape_spec(shape: Shape, kv_dtype: str = "bf16") -> ModelSpec:
    """The cache of a shape that is nobody's model: the fields of a config; "a*3 b" stands for the list it spells."""
    lists = {key: expand(value) for key, value in shape.items() if key in LISTS and isinstance(value, str)}
    return from_config(shape | lists, name="shape", kv_format=kv_dtype)


def _values(part: CacheSpec, tokens: int) -> int:
    rows = sum(row.heads * row.width for row in part.rows()) * part.entries(tokens)
    return rows + sum(array.elements for array in getattr(part, "arrays", ()))


def _tokens(number: int) -> str:
    return "1 token" if number == 1 else f"{number:,} tokens"


@check
def shape_values(shape: Shape, tokens: int) -> Value:
    """Numbers that a sequence of `tokens` tokens keeps in all layers of a shape."""
    number = sum(_values(part, tokens) for _, part in shape_spec(shape).parts())
    return Value(number, f"{number:,} values for {_tokens(tokens)}")


@check
def shape_bytes(shape: Shape, tokens: int, kv_dtype: str = "bf16") -> Value:
    """Bytes that a sequence of `tokens` tokens keeps in all layers of a shape."""
    number = shape_spec(shape, kv_dtype).bytes_at(tokens)
    return Value(number, f"{number:,} B = {human_bytes(number)} for {_tokens(tokens)}", brief=human_bytes(number))


@check
def row_width(shape: Shape, name: str) -> Value:
    """Numbers that one entry stores under one name ("k", "latent", "rope") in the first layer of a shape."""
    rows = [row for _, part in shape_spec(shape).parts() for row in part.rows() if row.name == name]
    number = rows[0].heads * rows[0].width
    return Value(number, f"{number} values of {name}")


@check
def shared_source(shape: Shape, layer: int) -> Value:
    """1 when layer `layer` of a shape owns nothing and reads another's cache, else 0."""
    parts = shape_spec(shape).layers[layer].parts
    source = getattr(parts[0], "source", None)
    text = f"layer {layer} {'has a cache of its own' if source is None else f'reads the cache of layer {source}'}"
    return Value(float(source is not None), text)


@check
def window_positions(shape: Shape, tokens: int) -> Value:
    """The oldest position held after `tokens` tokens, one token a page, in the block table of a shape's first group."""
    groups = group_parts(shape_spec(shape), 1)
    manager = KVCacheManager(groups, [tokens + 1] * len(groups), 1)
    held: list[list[int]] = []
    for n in range(1, tokens + 1):
        manager.allocate("r", n)
        held.append([i for i, page in enumerate(manager.block_table("r")) if page])
        manager.advance("r", n)
    lines = ", ".join(f"{i}: {h[0]}-{h[-1]}" for i, h in enumerate(held))
    return Value(held[-1][0], f"positions held after each token {lines}; at most {max(map(len, held))}")


@check
def entries_held(model: str, tokens: str | int, change: Shape | None = None) -> Value:
    """Entries that the first layer with a limit (a window, a chunk, a compression) holds of `tokens` tokens."""
    exact, decimal = token_readings(tokens)
    spec = model_spec(model, change=change)
    part = next(p for _, p in spec.parts() if p.retention.rule in ("window", "chunk", "stride"))
    return Value(part.entries(exact), f"{part.entries(exact):,} entries of {exact:,} tokens", (part.entries(decimal),))


@check
def compressed_entries(model: str, tokens: str | int, layer: int) -> Value:
    """Compressed entries that one layer stores of `tokens` tokens."""
    exact, decimal = token_readings(tokens)
    part = next(p for p in model_spec(model).layers[layer].parts if p.kind == "compressed")
    ratio = part.retention.size
    text = f"{part.entries(exact):,} entries of {exact:,} tokens, one per {ratio}"
    return Value(part.entries(exact), text, (part.entries(decimal),))


@check
def compression(model: str, tokens: int, layer: int) -> Value:
    """Tokens for each compressed entry that one layer stores."""
    entries = compressed_entries(model, tokens, layer).number
    return Value(tokens / entries, f"{tokens:,} / {entries:,} = {tokens / entries:,.2f}")


def _kinds(model: str, change: Shape | None = None) -> list[str]:
    return [layer.kind for layer in model_spec(model, change=change).layers]


@check
def layers_of_kind(model: str, kind: str, change: Shape | None = None) -> Value:
    """Layers that have a part of `kind` ("full", "recurrent", "sliding", "compressed", ...)."""
    kinds = _kinds(model, change)
    number = sum(kind in k.split("+") for k in kinds)
    return Value(number, f"{number} of {len(kinds)} layers have {NAMES[kind]}")


@check
def layers_of_ratio(model: str, ratio: int, change: Shape | None = None) -> Value:
    """Layers that keep one compressed entry per `ratio` tokens; 0: layers with a window alone."""
    layers = model_spec(model, change=change).layers
    found = [{p.retention.size for p in layer.parts if p.kind == "compressed"} for layer in layers]
    number = sum(ratios == ({ratio} if ratio else set()) for ratios in found)
    what = f"one entry per {ratio} tokens" if ratio else "a window alone"
    return Value(number, f"{number} of {len(layers)} layers keep {what}")


@check
def place_of_kind(model: str, kind: str) -> Value:
    """The place of the first layer of `kind`, counted from 1, with the first eight layers' kinds."""
    kinds = _kinds(model)
    number = kinds.index(kind) + 1
    return Value(number, f"{kind} first in place {number}: " + ", ".join(kinds[:8]))


@check
def routed_layers(model: str, first: int | None = None) -> Value:
    """Layers with routed experts in place of the feed-forward part, of the first `first` layers or of all."""
    config = resolve(model).config | ({"num_hidden_layers": first} if first else {})
    found = count(config)
    text = f"{found.moe_layers} of {config['num_hidden_layers']} layers route, {found.experts_per_token} of "
    return Value(found.moe_layers, text + f"{found.num_experts} experts")


def _state(number: int, what: str) -> Value:
    size = f"{gb(number)} = {gib(number)}" if number >= 10**8 else f"{number / 1e6:,.2f} MB = {human_bytes(number)}"
    return Value(number, f"{number:,} B = {size} {what}", brief=human_bytes(number))


@check
def state_bytes(
    model: str, array: str = "", change: Shape | None = None, state_dtype: str = "fp32", conv_dtype: str = "bf16"
) -> Value:
    """Bytes of recurrent state of one sequence, of all arrays or of one ("state", "conv")."""
    target = resolve(model)
    spec = from_config(
        changed(target.config, change or {}), name=target.name, state_format=state_dtype, conv_format=conv_dtype
    )
    arrays = [a for _, p in spec.parts() if p.kind == "recurrent" for a in p.arrays]  # type: ignore[attr-defined]
    number = sum(a.array_bytes for a in arrays if array in ("", a.name))
    return _state(
        number,
        f"of {array or 'state and convolution'} in {len(spec.layers)} layer{'s' * (len(spec.layers) > 1)}, {state_dtype}",
    )


@check
def state_per_channel(model: str) -> Value:
    """Values that a Mamba layer's state keeps for each channel."""
    config = resolve(model).config
    plain = get_format("fp32")
    fields = fields_of(config, config["model_type"], Formats(plain, plain, plain))
    number = fields.need("mamba_d_state")
    return Value(number, f"{model}: {number} values per channel")
