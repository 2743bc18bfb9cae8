"""decode_layers, composed of the small operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvlab.ops.attention import paged_attention
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.decode_layers import LayerStack
from kvlab.ops.linear import linear
from kvlab.ops.mlp import mlp
from kvlab.ops.qkv import qkv
from kvlab.ops.views import PageViews
from kvlab.ops.write_kv import write_kv


def decode_layers(
    x: torch.Tensor,
    stack: LayerStack,
    views: Sequence[PageViews],
    batches: Sequence[AttentionBatch],
    angles: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """See `kvlab.ops.decode_layers.decode_layers`."""
    rows = torch.arange(len(x), device=x.device)
    for layer, pages, batch in zip(stack.layers, views, batches, strict=True):
        query, key, value = qkv(x, layer.qkv, *angles, rows)
        write_kv(key, value, pages, batch.slot_mapping)
        options = {"scale": layer.scale, "window": layer.window, "softcap": layer.softcap}
        seen = paged_attention(query, pages, batch, **options)
        x = mlp(linear(seen.flatten(1), layer.out, layer.out_bias, residual=x), layer.mlp)
    return x
