"""A run of decoder layers for a step that only decodes: one launch, because threads that meet cost more than they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.dispatch import cpu_kernels
from kvlab.ops.linear import APART
from kvlab.ops.mlp import MLPWeights
from kvlab.ops.qkv import QKVWeights
from kvlab.ops.views import PageViews


@dataclass(frozen=True, eq=False)
class DecodeLayer:
    """A layer: norm, grouped-query attention with rotated heads, norm, SwiGLU feed-forward.

    Attributes:
        out, out_bias: [H, Hq * D] and [H] or None, the projection after attention.
        scale, window, softcap: of attention, as in `kvlab.ops.attention.paged_attention`.
    """

    qkv: QKVWeights
    out: torch.Tensor
    out_bias: torch.Tensor | None
    mlp: MLPWeights
    scale: float
    window: int = 0
    softcap: float = 0.0

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(Hq, Hkv, D, width of the feed-forward part)."""
        return self.qkv.num_heads, self.qkv.num_kv_heads, self.qkv.head_dim, self.mlp.down.shape[1]


@dataclass(frozen=True, eq=False)
class LayerStack:
    """Layers one after the other; `prepared` is where a backend keeps what it made of them."""

    layers: tuple[DecodeLayer, ...]
    prepared: dict[str, Any] = field(default_factory=dict)


def decode_layers(
    x: torch.Tensor,
    stack: LayerStack,
    views: Sequence[PageViews],
    batches: Sequence[AttentionBatch],
    angles: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """The residual stream [T, H] after all layers; the step's keys and values are written to their pages.

    Args:
        x: [T, H], the residual stream before them; row b is the new token of sequence b.
        views, batches: of each layer.
        angles: cosines and sines [T, R / 2] of each row, the same for all layers.
    """
    if fuses(x, stack, views, batches):
        from kvlab.ops.decode_layers import cpu

        return cpu.decode_layers(x, stack, views, batches, angles)
    from kvlab.ops.decode_layers import reference

    return reference.decode_layers(x, stack, views, batches, angles)


def fuses(x: torch.Tensor, stack: LayerStack, views: Sequence[PageViews], batches: Sequence[AttentionBatch]) -> bool:
    """Whether the one launch runs this step: fp32, fewer than APART rows, one new token a sequence, layers alike."""
    if (
        len(x) >= APART
        or not cpu_kernels(x, stack.layers[0].qkv.weight)
        or batches[0].max_query_len > 1
        or batches[0].tree is not None
    ):
        return False
    if not all(v.format == "fp32" for v in views):
        return False
    if "uniform" not in stack.prepared:
        stack.prepared["uniform"] = all(layer.sizes == stack.layers[0].sizes for layer in stack.layers)
    return stack.prepared["uniform"]
