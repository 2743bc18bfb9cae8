"""Shapes that served models have: one attention layer and one batch. Standard library only, for chapters without triton."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One layer and one batch.

    Attributes:
        heads, kv_heads, dim, value_dim: Hq, Hkv, D, Dv.
        fmt: storage format. window, chunk, softcap, sinks: as `kvlab.ops.attention.paged_attention`.
        batch, context, new: sequences, tokens of each, new ones of each.
    """

    heads: int
    kv_heads: int
    dim: int
    value_dim: int = 0
    fmt: str = "bf16"
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    batch: int = 8
    context: int = 8192
    new: int = 1


SHAPES = {
    "llama-3-8b": Shape(32, 8, 128),
    "llama-3-70b-tp8": Shape(8, 1, 128, batch=32),
    "gpt-oss-window": Shape(64, 8, 64, window=128, sinks=True),
    "gpt-oss": Shape(64, 8, 64, sinks=True),
    "gemma-2-9b": Shape(16, 8, 256, softcap=50.0),
    "gemma-3-4b-window": Shape(8, 4, 256, window=1024),
    "phi-2": Shape(32, 32, 80),
    "phi-3-mini": Shape(32, 32, 96),
    "head-112": Shape(32, 8, 112),
    "falcon-7b": Shape(71, 1, 64),
    "llama-4-chunk": Shape(40, 8, 128, chunk=8192, context=32768),
    "deepseek-expanded": Shape(16, 16, 192, 128),
}
