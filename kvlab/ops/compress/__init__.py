"""Compression of windows of tokens into one entry each, across steps: what waits for its window to close lies in pages."""

from __future__ import annotations

import torch

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.compress import reference, torch_
from kvlab.ops.compress.closed import Closed, entry_slots
from kvlab.ops.dispatch import backend
from kvlab.ops.views import SegmentViews

__all__ = ["Closed", "compress", "entry_slots"]


def compress(
    rows: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor,
    views: SegmentViews,
    batch: AttentionBatch,
    *,
    ratio: int,
    overlap: bool = False,
    prefix: str = "",
) -> Closed:
    """The entries of the windows that this step's tokens close; keeps the open windows' inputs in `views`.

    Window w is tokens w * ratio .. (w + 1) * ratio - 1. Its entry is a mean of their values, each feature weighted by a
    softmax over its tokens of gate + bias. With `overlap` values are two series: the entry of w is over the first
    series of window w - 1 and the second of w together, 2 * ratio tokens (window 0 has no first part).

    Args:
        rows: (values, gates) [T, F], F = D, or 2 * D with `overlap`.
        bias: [ratio, F], by a token's place in its window.
        views: of the open buffers, flat arrays `{prefix}open_kv`, `..open_gate` [pages, (ratio - 1) * F] and with
            `overlap` `{prefix}overlap_kv`, `..overlap_gate` [pages, ratio * D].
        batch: the step, with the table of states: block_table [B, 1].

    Source: DeepSeek-V4 report, equations 9-12 and 20-23; transformers 5.24.0 modeling_deepseek_v4.py,
    DeepseekV4HCACompressor and DeepseekV4CSACompressor.
    """
    run = reference if backend(rows[0]) == "reference" else torch_
    wide = torch.promote_types(rows[0].dtype, torch.float32)
    rows, bias = (rows[0].to(wide), rows[1].to(wide)), bias.to(wide)
    held = {name: views[prefix + name] for name in (reference.OVERLAPPING if overlap else reference.OPEN)}
    return run.compress(rows, bias, held, batch, ratio)
