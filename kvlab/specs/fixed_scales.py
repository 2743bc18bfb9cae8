"""Bytes of scales that are found once from data: they lie beside the pool, once per layer, and in no page."""

from __future__ import annotations

from kvlab.specs.model import ModelSpec
from kvlab.specs.parts import Attention

FIXED = ("fp8_e4m3", "fp8_e5m2")
"""Formats whose scale is 1 unless one was found from data."""
SHARES = ("tensor", "head", "channel")
"""What shares a scale: all keys (or values) of a layer, those of a KV head, those of one channel of a head."""


def fixed_scale_bytes(model: ModelSpec, share: str) -> int:
    """Bytes of fp32 scales of keys and values, if every layer in a format of `FIXED` has them.

    Raises:
        ValueError: an unknown share.
    """
    if share not in SHARES:
        raise ValueError(f"share {share!r}: must be one of {', '.join(SHARES)}")
    parts = [p for _, p in model.parts() if isinstance(p, Attention) and p.format.name in FIXED]
    if share == "channel":
        return sum(4 * p.num_kv_heads * (p.key_dim + p.value_dim) for p in parts)
    return sum(4 * 2 * (p.num_kv_heads if share == "head" else 1) for p in parts)
