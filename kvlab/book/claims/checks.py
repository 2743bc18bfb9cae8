"""What a computed claim may ask of kvlab. Each function calls the planner or the specs; none has a formula of its own.

A function returns a `Value`: the number in base units (bytes, tokens, seconds, or plain), a text for people, and the
number under the other unit conventions a writer may have meant (contexts of 1,000-based k).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvlab.plan.hardware import get_gpu
from kvlab.specs.families import from_config
from kvlab.specs.model import ModelSpec
from kvlab.specs.resolve import resolve
from kvlab.specs.units import gb, gib, human_bytes, parse_tokens
from kvlab.specs.weights import count


@dataclass(frozen=True)
class Value:
    """A computed number in base units, its text, and its other readings."""

    number: float
    text: str
    other_readings: tuple[float, ...] = ()


_CHECKS: dict[str, Callable[..., Value]] = {}


def check(function: Callable[..., Value]) -> Callable[..., Value]:
    """Registers a function that claims may call by name."""
    _CHECKS[function.__name__] = function
    return function


def run(row: dict[str, Any]) -> Value:
    """The value of one check row: {call = name, ...arguments}.

    Raises:
        ValueError: no such check.
    """
    arguments = {k: v for k, v in row.items() if k != "call"}
    if row.get("call") not in _CHECKS:
        raise ValueError(f"check {row.get('call')!r}: must be one of {', '.join(_CHECKS)}")
    return _CHECKS[row["call"]](**arguments)


def describe(row: dict[str, Any]) -> str:
    """The call as it is written: "bytes_per_token(model='llama-3-70b')"."""
    return f"{row['call']}({', '.join(f'{k}={v!r}' for k, v in row.items() if k != 'call')})"


@cache
def _model(name: str, kv_dtype: str = "bf16") -> ModelSpec:
    target = resolve(name)
    return from_config(target.config, name=target.name, kv_format=kv_dtype)


def _readings(tokens: str | int) -> tuple[int, int]:
    """(tokens with k = 1,024, tokens with k = 1,000)."""
    exact = parse_tokens(tokens)
    text = str(tokens).strip().lower()
    thousands = int(float(text[:-1]) * 1000) if text.endswith("k") else exact
    return exact, thousands


@check
def bytes_per_token(model: str, kv_dtype: str = "bf16") -> Value:
    """Bytes one more token adds below every window."""
    number = _model(model, kv_dtype).bytes_per_token_short
    return Value(number, f"{number:,} B = {human_bytes(int(number))}")


@check
def sequence_bytes(model: str, tokens: str | int, kv_dtype: str = "bf16", sequences: int = 1) -> Value:
    """Bytes of the cache of `sequences` sequences of `tokens` tokens."""
    exact, thousands = _readings(tokens)
    spec = _model(model, kv_dtype)
    number, other = (spec.bytes_at(n) * sequences for n in (exact, thousands))
    return Value(number, f"{number:,} B = {gb(number)} = {gib(number)} ({exact:,} tokens)", (other,))


@check
def layers(model: str) -> Value:
    """Decoder layers."""
    number = len(_model(model).layers)
    return Value(number, f"{number} layers")


@check
def cached_layers(model: str) -> Value:
    """Layers that own a cache."""
    number = sum(1 for layer in _model(model).layers if any(p.retention.rule != "none" for p in layer.parts))
    return Value(number, f"{number} layers with a cache of their own")


@check
def kv_heads(model: str) -> Value:
    """KV heads of the first attention layer."""
    number = next(p.num_kv_heads for _, p in _model(model).parts() if hasattr(p, "num_kv_heads"))
    return Value(number, f"{number} KV heads")


@check
def query_heads(model: str) -> Value:
    """Query heads."""
    number = _model(model).num_query_heads
    return Value(number, f"{number} query heads")


@check
def head_dim(model: str) -> Value:
    """Width of a cached key."""
    number = next(p.key_dim for _, p in _model(model).parts() if hasattr(p, "key_dim"))
    return Value(number, f"head_dim {number}")


@check
def max_position(model: str) -> Value:
    """Longest position the model was made for."""
    number = _model(model).max_position or 0
    return Value(number, f"{number:,} tokens")


@check
def parameters(model: str) -> Value:
    """Parameters, tied embeddings once."""
    number = count(resolve(model).config).total
    return Value(number, f"{number:,} parameters")


@check
def active_parameters(model: str) -> Value:
    """Parameters one token uses."""
    number = count(resolve(model).config).active
    return Value(number, f"{number:,} parameters used by one token")


@check
def weights_bytes(model: str, bytes_per_parameter: int = 2) -> Value:
    """Bytes of the weights at a whole number of bytes per parameter."""
    number = count(resolve(model).config).total * bytes_per_parameter
    return Value(number, f"{number:,} B = {gb(number)} = {gib(number)}")


@check
def gpu_memory(gpu: str) -> Value:
    """Bytes of memory of one GPU, as the driver reports them where that is known."""
    number = get_gpu(gpu).memory_bytes
    return Value(number, f"{number:,} B = {gb(number)} = {gib(number)}")


@check
def ratio(of: dict[str, Any], to: dict[str, Any]) -> Value:
    """One check's number divided by another's."""
    top, bottom = run(of), run(to)
    others = tuple(a / b for a, b in zip(top.other_readings, bottom.other_readings, strict=False))
    number = top.number / bottom.number
    return Value(number, f"{top.text} / {bottom.text} = {number:,.3g}", others)


@check
def exceeds(of: dict[str, Any], to: dict[str, Any]) -> Value:
    """1 when the first check's number is larger than the second's, else 0."""
    top, bottom = run(of), run(to)
    number = float(top.number > bottom.number)
    return Value(number, f"{top.text} {'>' if number else '<='} {bottom.text}")
