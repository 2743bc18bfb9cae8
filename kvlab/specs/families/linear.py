"""Layers that sum keys and values into one matrix per head."""

from __future__ import annotations

from kvlab.specs.families.dense import Parts, full
from kvlab.specs.families.fields import Fields
from kvlab.specs.families.windows import by_type, layer_types
from kvlab.specs.parts import RecurrentState, StateArray


def matrices(f: Fields, mechanism: str, columns: int) -> Parts:
    """One head_dim x (head_dim + `columns`) matrix per head."""
    heads = f.need("num_attention_heads")
    width = f.need("head_dim") if f.get("head_dim") else f.need("hidden_size") // heads
    units = ((heads, width * (width + columns)),)
    return (RecurrentState(mechanism, (StateArray("state", units, 1, f.formats.state),)),)


def linear_attention(f: Fields) -> list[Parts]:
    """Linear attention, a column more for the sum of keys; attention where layer_types says full_attention."""
    return _hybrid(f, matrices(f, "linear_attention", 1))


def retnet(f: Fields) -> list[Parts]:
    """Retention; attention where layer_types says full_attention."""
    return _hybrid(f, matrices(f, "retention", 0))


def _hybrid(f: Fields, recurrent: Parts) -> list[Parts]:
    kinds = layer_types(f, ["linear_attention"] * f.num_layers)
    return by_type(f, kinds, {"full_attention": full, "linear_attention": lambda f: recurrent})
