"""Checks on a model's shape: its cache, its layers and heads, its parameters."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from kvlab.book.claims.checks.registry import Value, check
from kvlab.specs import catalogue
from kvlab.specs.families import from_config
from kvlab.specs.formats import get_format
from kvlab.specs.model import ModelSpec
from kvlab.specs.parts import CacheSpec
from kvlab.specs.resolve import resolve
from kvlab.specs.units import gb, gib, human_bytes, parse_tokens
from kvlab.specs.weights import count


def model_spec(name: str, kv_dtype: str = "bf16", change: dict[str, Any] | None = None) -> ModelSpec:
    """The named model's cache, with fields of its config changed."""
    return _model(name, kv_dtype, json.dumps(change or {}))


@cache
def _model(name: str, kv_dtype: str, change: str) -> ModelSpec:
    target = resolve(name)
    return from_config(changed(target.config, json.loads(change)), name=target.name, kv_format=kv_dtype)


def changed(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The config with fields replaced, those of the text decoder where the config wraps one."""
    if isinstance(config.get("text_config"), dict):
        return config | {"text_config": config["text_config"] | change}
    return config | change


def token_readings(tokens: str | int) -> tuple[int, int]:
    """(tokens with k = 1,024 and M = 1,048,576, tokens with k = 1,000 and M = 1,000,000)."""
    exact, text = parse_tokens(tokens), str(tokens).strip().lower()
    decimal = {"k": 10**3, "m": 10**6}.get(text[-1])
    return exact, int(float(text[:-1]) * decimal) if decimal else exact


@check
def bytes_per_token(model: str, kv_dtype: str = "bf16", change: dict[str, Any] | None = None) -> Value:
    """Bytes one more token adds below every window; `change` replaces fields of the config."""
    number = model_spec(model, kv_dtype, change).bytes_per_token_short
    kilo = f" = {number / 1000:,.2f} KB" if number >= 1000 else ""
    kibi = human_bytes(int(number))
    return Value(number, f"{number:,} B{kilo} = {kibi}", brief=kibi)


@check
def sequence_bytes(
    model: str,
    tokens: str | int,
    kv_dtype: str = "bf16",
    sequences: int = 1,
    change: dict[str, Any] | None = None,
) -> Value:
    """Bytes of the cache of `sequences` sequences of `tokens` tokens; `change` replaces fields of the config."""
    exact, decimal = token_readings(tokens)
    spec = model_spec(model, kv_dtype, change)
    number, other = (spec.bytes_at(n) * sequences for n in (exact, decimal))
    times = f"{sequences} x " if sequences > 1 else ""
    also = f"; {gb(other)} at {times}{decimal:,}" if decimal != exact else ""
    size = f"{gb(number)} = {gib(number)}" if number >= 10**8 else human_bytes(number)
    text = f"{number:,} B = {size} ({times}{exact:,} tokens{also})"
    return Value(number, text, (other,), gb(number))


@check
def layers(model: str) -> Value:
    """Decoder layers."""
    number = len(model_spec(model).layers)
    return Value(number, f"{number} layers")


@check
def cached_layers(model: str) -> Value:
    """Layers that own a cache."""
    number = sum(1 for layer in model_spec(model).layers if any(p.retention.rule != "none" for p in layer.parts))
    return Value(number, f"{number} layers with a cache of their own")


def _first_part(model: str, field: str) -> CacheSpec:
    return next(p for _, p in model_spec(model).parts() if hasattr(p, field))


@check
def kv_heads(model: str) -> Value:
    """KV heads of the first attention layer."""
    number = _first_part(model, "num_kv_heads").num_kv_heads  # type: ignore[attr-defined]
    return Value(number, f"{number} KV heads")


@check
def query_heads(model: str) -> Value:
    """Query heads."""
    number = model_spec(model).num_query_heads
    return Value(number, f"{number} query heads")


@check
def head_dim(model: str) -> Value:
    """Width of a cached key."""
    number = _first_part(model, "key_dim").key_dim  # type: ignore[attr-defined]
    return Value(number, f"head_dim {number}")


@check
def hidden_size(model: str) -> Value:
    """Width of the residual stream."""
    number = model_spec(model).hidden_size
    return Value(number, f"hidden size {number:,}")


@check
def cached_vectors(model: str) -> Value:
    """How many kinds of vector the first layer keeps per token: 2 for keys and values."""
    rows = next(part for _, part in model_spec(model).parts()).rows()
    return Value(len(rows), f"{len(rows)}: " + ", ".join(f"{r.name} {r.heads} x {r.width}" for r in rows))


@check
def window(model: str) -> Value:
    """Tokens of the first layer that has a window."""
    number = next(p.retention.size for _, p in model_spec(model).parts() if p.retention.rule == "window")
    return Value(number, f"window of {number:,} tokens")


@check
def max_position(model: str) -> Value:
    """Longest position the model was made for."""
    number = model_spec(model).max_position or 0
    return Value(number, f"{model}: {number:,} tokens")


@check
def longest_position() -> Value:
    """The longest position of the whole catalogue."""
    name = max(catalogue.names(), key=lambda n: model_spec(n).max_position or 0)
    return max_position(name)


@check
def parameters(model: str) -> Value:
    """Parameters, tied embeddings once."""
    number = count(resolve(model).config).total
    return Value(
        number, f"{number:,} parameters = {number / 1e9:,.1f} billion", brief=f"{number / 1e9:,.1f} billion parameters"
    )


@check
def active_parameters(model: str) -> Value:
    """Parameters one token uses."""
    number = count(resolve(model).config).active
    return Value(
        number,
        f"{number:,} parameters used by one token = {number / 1e9:,.1f} billion",
        brief=f"{number / 1e9:,.1f} billion used",
    )


@check
def code_bytes(dtype: str, values: int = 1) -> Value:
    """Bytes of `values` numbers in a storage format, without scales."""
    number = get_format(dtype).code_bytes(values)
    return Value(number, f"{_values(values)} in {dtype}: {number:,} B")


@check
def stored_bytes(dtype: str, values: int) -> Value:
    """Bytes of a row of `values` numbers in a storage format, scales included."""
    number = get_format(dtype).row_bytes(values)
    return Value(number, f"{_values(values)} in {dtype} with scales: {number:,} B")


def _values(number: int) -> str:
    return "1 value" if number == 1 else f"{number:,} values"
